"""Certification: try candidates on the probes and choose the first that the referee accepts on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tito_core.chat.delta import CANDIDATES, Candidate, DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import Opened
from tito_core.chat.probes import USUAL, Case, cases
from tito_core.chat.referee import Referee, RefusedError
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.verdict import Difference, Judge, JudgedTurn

JudgeOf = Callable[[Sequence[int]], Judge]
"""Makes the judge of deltas for the given stop token ids."""


@dataclass(slots=True)
class Trial:
    """Results of the probes for one candidate.

    Attributes:
        passed: Probes on which the delta equals the template's own rendering.
        refused: Probes that the template refuses or renders only in part, each with the reason.
        unable: Number of refused probes that another candidate may be able to render.
        moved: Probes in which the template moves text that was sampled before calls.
        difference: The first probe whose delta is wrong, with the difference.
    """

    source: DeltaSource
    passed: list[Case] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    unable: int = 0
    moved: list[str] = field(default_factory=list)
    difference: tuple[str, Difference] | None = None

    @property
    def tools(self) -> bool:
        """Whether a probe with tool results passed."""
        return any(case.calls and not case.remark for case in self.passed)

    @property
    def needs_tools(self) -> bool:
        """Whether the template works only with tools."""
        return bool(self.passed) and all(case.tools for case in self.passed)


def choose(
    rendering: Rendering, encoder: ContentSafeEncoder, judge: JudgeOf, candidates: Sequence[Candidate] = CANDIDATES
) -> Trial:
    """Return the first candidate that is right on all probes that the template accepts.

    If every candidate fails to render some of them, return the one that renders most; the rest raise in use.

    Raises:
        TemplateError: Each candidate gives a wrong delta. The message shows the first difference of the one that
            passed most probes.
    """
    _check_renderings(rendering, judge(()).referee)
    trials: list[Trial] = []
    refusal: TemplateError | None = None
    for candidate in candidates:
        try:
            trial = attempt(DeltaSource.of(rendering, encoder, candidate), judge, cases())
        except TemplateError as error:
            refusal = refusal or error
            continue
        if trial.difference is None and not trial.unable:
            return trial
        trials.append(trial)
    right = [trial for trial in trials if trial.difference is None]
    if right:
        return min(right, key=lambda trial: trial.unable)
    furthest = max(trials, key=lambda trial: len(trial.passed), default=None)
    if furthest is None or furthest.difference is None:
        raise refusal or TemplateError("No candidates to certify: pass at least one.")
    probe, difference = furthest.difference
    raise TemplateError(
        "The chat template renders a message differently depending on what precedes it, so a turn's prompt cannot "
        f"extend the previous one. On the probe {probe!r}, rendering {furthest.source.candidate.name} differs "
        f"{difference}\nUse a template that renders a message the same everywhere, such as its training variant."
    )


def _check_renderings(rendering: Rendering, referee: Referee) -> None:
    """Check that tracing content does not change the rendering.

    Raises:
        TemplateError: A probe is rendered differently from transformers.
    """
    for case in cases():
        try:
            plain = referee.render(case.history, case.system, case.tools)
            traced = rendering.of_messages(case.history, case.system, case.tools)
        except (RefusedError, TemplateError):
            continue  # refused probes are judged together with the delta
        if str.__ne__(traced, plain):
            raise TemplateError(
                "Unsupported chat template: content cannot be traced through it. On the probe "
                f"{case.name!r}, its traced rendering differs from that of transformers "
                f"{Difference(plain, str.__str__(traced))}\nSimplify its string operations, or use another template."
            )


def attempt(source: DeltaSource, judge_of: JudgeOf, probes: Iterable[Case]) -> Trial:
    """Try one candidate on probes, up to the first difference.

    Raises:
        TemplateError: The template refuses all probes.
    """
    trial, judge = Trial(source), judge_of(source.stops)
    for case in probes:
        turn = JudgedTurn(case.before, case.answer, case.new, case.system, case.tools, case.opened is None)
        try:
            difference = judge.difference(turn, partial(_ids, source, case))
        except RefusedError as error:
            trial.refused.append((case.name, str(error)))
            continue
        except TemplateError as error:  # only the candidate's conversation is refused
            if case.name.partition(",")[0] not in USUAL:
                trial.refused.append((case.name, str(error)))
                trial.unable += 1
                continue
            difference = Difference("(it is rendered)", f"(refused: {error})")
        if difference is None:
            trial.passed.append(case)
        elif case.remark and judge.moves_text(turn):
            # Sampled text stays in its place, so only the probes without text before calls decide.
            trial.moved.append(case.name)
        else:
            trial.difference = case.name, difference
            return trial
    if not trial.passed:
        raise TemplateError(trial.refused[0][1] if trial.refused else "No probes to try: pass at least one.")
    return trial


def _ids(source: DeltaSource, case: Case, last: int | None) -> list[int]:
    opened = case.opened or Opened.MESSAGE
    encoded = source.delta(case.answer, case.new, last, opened, case.tools or (), case.before)
    ids: list[int] = encoded.ids.tolist()
    return ids


def judge_of(referee: Referee, encoder: ContentSafeEncoder) -> JudgeOf:
    """Return a factory of judges. They use the tokenizer itself, not the encoder's inert copy."""
    backend = encoder.tokenizer
    controls = {index: text for text, index in encoder.added.items()}

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(ids: list[int]) -> str:
        return str(backend.decode(ids, skip_special_tokens=False))

    return lambda stops: Judge(referee, encode, decode, controls, frozenset(stops), encoder.eos_id)
