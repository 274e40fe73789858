"""Certification: try candidates on the probes, and choose the first that the referee finds right on all of them."""

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
from tito_core.chat.verdict import Difference, Judge, Turn

JudgeOf = Callable[[Sequence[int]], Judge]
"""Makes the judge of deltas, given the ids at which the engine is to stop."""


@dataclass(slots=True)
class Trial:
    """What the probes showed of one candidate.

    Attributes:
        passed: Those on which its delta is the template's own.
        refused: Those that the template refuses, or shows in part only, each with the reason.
        unable: How many of these the template takes, so that another candidate may be able to.
        moved: Those in which the template writes text besides calls in another place than it was sampled in.
        difference: The first that is wrong, and how.
    """

    source: DeltaSource
    passed: list[Case] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    unable: int = 0
    moved: list[str] = field(default_factory=list)
    difference: tuple[str, Difference] | None = None

    @property
    def tools(self) -> bool:
        """Whether results of tools are right."""
        return any(case.calls and not case.remark for case in self.passed)

    @property
    def needs_tools(self) -> bool:
        """Whether the template works only where tools are given."""
        return bool(self.passed) and all(case.tools for case in self.passed)


def choose(
    rendering: Rendering, encoder: ContentSafeEncoder, judge: JudgeOf, candidates: Sequence[Candidate] = CANDIDATES
) -> Trial:
    """Return the first candidate that is right on all probes that the template takes.

    Where each is unable to render some of them, the one that is able to render most: the others raise in use.

    Raises:
        TemplateError: None is; the message shows the first difference of the one that came furthest.
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
        raise refusal or TemplateError("There is no candidate to try.")
    probe, difference = furthest.difference
    raise TemplateError(
        "What the chat template writes after a turn depends on more than the turn, so a turn's prompt cannot extend "
        f"the one before it: on the probe {probe!r}, rendering {furthest.source.candidate.name} differs {difference}\n"
        "Use a template that writes a message alike in every place, such as the training variant of this one."
    )


def _check_renderings(rendering: Rendering, referee: Referee) -> None:
    """Check that tracing content changes nothing of what the template writes.

    Raises:
        TemplateError: Some conversation is rendered in another way than transformers renders it.
    """
    for case in cases():
        try:
            plain = referee.render(case.history, case.system, case.tools)
            traced = rendering.of_messages(case.history, case.system, case.tools)
        except (RefusedError, TemplateError):
            continue  # one of them refuses it, which is judged with the delta
        if str.__ne__(traced, plain):
            raise TemplateError(
                "The chat template cannot be followed: with its content traced it writes another text than with "
                f"transformers, on the probe {case.name!r}, {Difference(plain, str.__str__(traced))}"
            )


def attempt(source: DeltaSource, judge_of: JudgeOf, probes: Iterable[Case]) -> Trial:
    """Try one candidate on probes, up to the first difference.

    Raises:
        TemplateError: The template refuses all probes.
    """
    trial, judge = Trial(source), judge_of(source.stops)
    for case in probes:
        turn = Turn(case.before, case.answered, case.new, case.system, case.tools, case.opened is None)
        try:
            difference = judge.difference(turn, partial(_ids, source, case))
        except RefusedError as error:
            trial.refused.append((case.name, str(error)))
            continue
        except TemplateError as error:  # the template takes the conversation, and not what the candidate makes of it
            if case.name.partition(",")[0] not in USUAL:
                trial.refused.append((case.name, str(error)))
                trial.unable += 1
                continue
            difference = Difference("(it is rendered)", f"(refused: {error})")
        if difference is None:
            trial.passed.append(case)
        elif case.remark and judge.moves_text(turn):
            # A policy's text besides calls stays where it was sampled; the probes without it decide.
            trial.moved.append(case.name)
        else:
            trial.difference = case.name, difference
            return trial
    if not trial.passed:
        raise TemplateError(trial.refused[0][1] if trial.refused else "There is no probe to try.")
    return trial


def _ids(source: DeltaSource, case: Case, last: int | None) -> list[int]:
    opened = case.opened or Opened.MESSAGE
    encoded = source.delta(case.answered, case.new, last, opened, case.tools or (), case.before)
    ids: list[int] = encoded.ids.tolist()
    return ids


def judge_of(referee: Referee, encoder: ContentSafeEncoder) -> JudgeOf:
    """Return what makes judges for a tokenizer: they use the tokenizer itself, not the encoder's stand-in for it."""
    backend = encoder.tokenizer
    controls = {index: text for text, index in encoder.added.items()}

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(ids: list[int]) -> str:
        return str(backend.decode(ids, skip_special_tokens=False))

    return lambda stops: Judge(referee, encode, decode, controls, frozenset(stops), encoder.eos_id)
