"""Certification: a template's deltas are tried on probes, and the referee decides (law 7).

The first candidate that is right on all probes is chosen, and what was found out is kept as a `Certificate`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import platformdirs
from strands.types.content import Messages
from strands.types.tools import ToolSpec

from tito_core.chat.delta import CANDIDATES, Candidate, DeltaSource, Switches
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import Opened, content_spans
from tito_core.chat.images import certify_images
from tito_core.chat.probes import (
    TOOLS,
    USUAL,
    Case,
    assistant_message,
    call_message,
    cases,
    result_message,
    user_message,
)
from tito_core.chat.referee import Difference, Judge, JudgedTurn, Referee, RefusedError
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.switches import compared_literals, find_switches
from tito_core.chat.traced import Traced

ContentTokens = Literal["inert", "as-template"]


class Thinking(StrEnum):
    """What a template does with the reasoning of earlier answers."""

    KEPT = "kept"
    STRIPPED = "stripped at the next question"
    ALWAYS_STRIPPED = "shown in the last answer only"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of certifying a template.

    Attributes:
        template: sha256 of the template's source, hex.
        tokenizer: sha256 of the tokenizer's definition, hex.
        arguments: The template arguments as text.
        candidate: Name of the chosen candidate for the delta.
        passed: Names of the probes on which the delta equals the template's own rendering.
        refused: Probes that the template itself refuses, each with the reason.
        rewrites: Where the template renders earlier messages differently from how they were sampled or prompted.
        thinking: What the template does with the reasoning of earlier answers.
        tools: Whether probes with tool results passed.
        needs_tools: Whether the template works only with tools.
        content_tokens: "inert", or "as-template" where content may become control tokens.
        placeholder: The control token that the template writes for an image, or None if it takes no images.
        images: Places where images are certified: "user messages", "tool results".
        images_refused: The other places, each with the reason.
        media_ids: Ids of the vocabulary's placeholders of images, videos and audio; empty if it takes no images.
        switches: Words that change what the template writes later if an earlier message holds them, as `/no_think`.
        system_switches: Such words in the system prompt.
        whole_history: Whether a delta after a word of `switches` is rendered with the whole history, and not with the
            history up to that word.
        layouts: Whether what the template writes around new content may be kept; see `layout`.
    """

    template: str
    tokenizer: str
    arguments: str
    candidate: str
    passed: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    rewrites: tuple[str, ...]
    thinking: Thinking
    tools: bool
    content_tokens: ContentTokens = "inert"
    needs_tools: bool = False
    placeholder: str | None = None
    images: tuple[str, ...] = ()
    images_refused: tuple[tuple[str, str], ...] = ()
    media_ids: tuple[int, ...] = ()
    switches: tuple[str, ...] = ()
    system_switches: tuple[str, ...] = ()
    whole_history: bool = False
    layouts: bool = True

    @property
    def moves_text(self) -> bool:
        """Whether the template moves text that was sampled with calls."""
        return any(line.startswith(_MOVED) for line in self.rewrites)

    def lines(self) -> Iterator[str]:
        """Yield the certificate as `tito template check` prints it."""
        yield f"template   sha256 {self.template}"
        yield f"tokenizer  sha256 {self.tokenizer}"
        yield f"delta      rendered {self.candidate}"
        yield f"probes     {len(self.passed)} equal to the template's own rendering, 0 different"
        only = ", and it works only with tools" if self.needs_tools else ""
        yield f"tools      {f'yes{only}' if self.tools else 'no: the template shows none'}"
        yield f"images     {f'{self.placeholder} in ' + ' and '.join(self.images) if self.images else 'no'}"
        for place, reason in self.images_refused if self.images else ():
            yield f"           not in {place}: {reason}"
        for reason, number in Counter(reason for _, reason in self.refused).items():
            first = next(probe for probe, each in self.refused if each == reason)
            yield f"refuses    {first}{f', and {number - 1} more' * (number > 1)}: {reason}"
        for rewrite in self.rewrites:
            yield f"rewrites   {rewrite}"
        for words, place, context in (
            (self.system_switches, "the system prompt", "the rollout's own system prompt"),
            (self.switches, "messages", f"the rollout's history{'' if self.whole_history else ' up to the last one'}"),
        ):
            if words:
                yield f"switches   {', '.join(map(repr, words))} in {place}: later deltas are rendered with {context}"
        yield f"reasoning  {self.thinking}"
        yield f"thinking   'keep' {_KEEP[self.thinking]}; 'as-template' {_AS_TEMPLATE[self.thinking]}"
        inert = "no control token comes from content" if self.content_tokens == "inert" else "content may write tokens"
        yield f"content    {self.content_tokens}: {inert}"

    def to_json(self) -> str:
        """Return the certificate as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Load a certificate from the output of `to_json`.

        Raises:
            ValueError: The text is not a certificate.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["passed"] = tuple(fields["passed"])
            fields["refused"] = tuple((probe, reason) for probe, reason in fields["refused"])
            fields["rewrites"] = tuple(fields["rewrites"])
            fields["images"], fields["media_ids"] = tuple(fields["images"]), tuple(fields["media_ids"])
            fields["images_refused"] = tuple((place, reason) for place, reason in fields["images_refused"])
            fields["thinking"] = Thinking(fields["thinking"])
            for name in ("switches", "system_switches"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a certificate of a chat template: {error!r}. Delete it to certify again.") from error


_MOVED = "text besides calls"
"""Prefix of the rewrite that marks a template which moves text that was sampled with calls."""
HEAD = "head"
"""Prefix of the rewrite by a template whose text before the first question depends on later messages."""
_KEEP = {
    Thinking.KEPT: "keeps it, as the template does",
    Thinking.STRIPPED: "keeps what was sampled, where the template would strip it",
    Thinking.ALWAYS_STRIPPED: "keeps what was sampled, where the template would strip it",
    Thinking.NOT_SHOWN: "keeps what was sampled",
}
_AS_TEMPLATE = {
    Thinking.KEPT: "does the same",
    Thinking.STRIPPED: "branches at each question after an answer with reasoning",
    Thinking.ALWAYS_STRIPPED: "branches after each answer with reasoning",
    Thinking.NOT_SHOWN: "branches after each answer with reasoning",
}


def default_folder() -> Path:
    """Return the folder of certificates: under `TITO_CACHE_DIR` if set, else under the platform's cache directory."""
    chosen = os.environ.get("TITO_CACHE_DIR")
    return (Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("tito"))) / "certificates"


class CertificateStore:
    """Reads and writes cached certificates. An unusable folder or a bad file counts as a cache miss.

    There is one small file for each template, tokenizer and set of template arguments.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def key(self, *facts: str) -> str:
        """Return the cache key for these facts and the current version of this package."""
        return hashlib.sha256("\0".join((_code(), *facts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def key_of(
        self, source: str, variables: Mapping[str, Any], encoder: ContentSafeEncoder, content_tokens: ContentTokens
    ) -> str:
        """Return the cache key of a template with its arguments and tokenizer."""
        arguments, added = repr(sorted(variables.items())), repr(sorted(encoder.added))
        return self.key(source, encoder.digest, arguments, content_tokens, added)

    def load(self, key: str) -> Certificate | None:
        """Return a certificate, or None where none is cached."""
        try:
            return Certificate.from_json((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def holds(self, key: str) -> bool:
        """Return whether a certificate may be cached."""
        return (self.folder / f"{key}.json").exists()

    def save(self, key: str, certificate: Certificate) -> None:
        """Write a certificate atomically."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(certificate.to_json())
            os.replace(path, self.folder / f"{key}.json")
        except OSError:
            return  # certified again next time, which takes a tenth of a second


@cache
def _code() -> str:
    """Return a digest of this package: a certificate is valid only for the code that made it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


JudgeOf = Callable[[Sequence[int]], Judge]
"""Makes the judge of deltas for the given stop token ids."""


def certified(
    source: str,
    rendering: Rendering,
    encoder: ContentSafeEncoder,
    referee: Referee,
    content_tokens: ContentTokens,
    image_token: str | None,
    store: CertificateStore,
) -> tuple[Certificate, DeltaSource]:
    """Return a template's certificate, from the store if it is there, and the deltas that it allows.

    Args:
        source: Source of the template.
        rendering: The compiled template.
        encoder: The tokenizer.
        referee: The plain rendering.
        content_tokens: Whether content is inert; the certificate says so.
        image_token: The placeholder that the tokenizer names, or None.
        store: Keeps a new certificate.

    Raises:
        TemplateError: No candidate is right.
    """
    key = store.key_of(source, rendering.variables, encoder, content_tokens)
    certificate = store.load(key)
    if certificate is None:
        certificate, deltas = _certify(source, rendering, encoder, referee, content_tokens, image_token)
        store.save(key, certificate)
        return certificate, deltas
    chosen = next(candidate for candidate in CANDIDATES if candidate.name == certificate.candidate)
    deltas = DeltaSource.of(rendering, encoder, chosen)
    if certificate.switches or certificate.system_switches:
        switches = Switches(certificate.system_switches, certificate.switches, certificate.whole_history)
        deltas = replace(deltas, switches=switches)
    return certificate, deltas if certificate.layouts else replace(deltas, layouts=None)


def _certify(
    source: str,
    rendering: Rendering,
    encoder: ContentSafeEncoder,
    referee: Referee,
    content_tokens: ContentTokens,
    image_token: str | None,
) -> tuple[Certificate, DeltaSource]:
    judge = judge_of(referee, encoder)
    trial = choose(rendering, encoder, judge)
    fault = partial(_image_fault, trial, judge)
    images = certify_images(trial.source, referee, fault, image_token=image_token, tools=trial.tools)
    literals = compared_literals(source, rendering.variables)
    deltas, switched = find_switches(trial.source, referee, literals, tools=trial.tools)
    switches = deltas.switches or Switches()
    moved = [f"{_MOVED}: it is written in another place ({name})" for name in trial.moved[:1]]
    certificate = Certificate(
        template=hashlib.sha256(source.encode()).hexdigest(),
        tokenizer=encoder.digest,
        arguments=repr(sorted(rendering.variables.items())),
        candidate=trial.source.candidate.name,
        passed=(*(case.name for case in trial.passed), *switched),
        refused=tuple(trial.refused),
        rewrites=(*rewrites(source, rendering.variables, rendering, tools=trial.tools), *moved),
        thinking=thinking(rendering),
        tools=trial.tools,
        needs_tools=trial.needs_tools,
        content_tokens=content_tokens,
        placeholder=images.placeholder,
        images=images.places,
        images_refused=images.refused,
        media_ids=images.media_ids,
        switches=switches.messages,
        system_switches=switches.system,
        whole_history=switches.whole_history,
        layouts=deltas.layouts is not None,
    )
    return certificate, deltas


def _image_fault(chosen: Trial, judge_of: JudgeOf, probes: Sequence[Case]) -> str | None:
    """Return why a candidate is wrong on probes with images, or None; where a layout is wrong, it keeps none."""
    trial = attempt(chosen.source, judge_of, probes)
    chosen.source = trial.source
    if trial.refused:
        return f"It refuses the probe {trial.refused[0][0]!r}: {trial.refused[0][1]}"
    if trial.difference is not None:
        probe, difference = trial.difference
        return f"It renders an image differently depending on what precedes it. On the probe {probe!r}, {difference}"
    return None


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

    Probes of one shape in several places hold different texts. So the judge, which renders whole conversations, sees
    the deltas of layouts too; where one is wrong, the candidate keeps none.

    Raises:
        TemplateError: The template refuses all probes, or the candidate's conversation of a usual one.
    """
    trial, judge = Trial(source), judge_of(source.stops)
    for case in probes:
        turn = JudgedTurn(case.before, case.answer, case.new, case.system, case.tools, case.opened is None)
        try:
            difference = judge.difference(turn, partial(_ids, trial.source, case))
            if difference is not None and trial.source.layouts is not None:
                unkept = replace(trial.source, layouts=None)
                if judge.difference(turn, partial(_ids, unkept, case)) is None:
                    trial.source, difference = unkept, None
        except RefusedError as error:
            trial.refused.append((case.name, str(error)))
            continue
        except TemplateError as error:  # only the candidate's conversation is refused
            if case.name.partition(",")[0] not in USUAL:
                trial.refused.append((case.name, str(error)))
                trial.unable += 1
                continue
            raise TemplateError(
                f"The chat template shows the probe {case.name!r}, but no delta of it, so a turn's prompt cannot "
                f"extend the previous one. Rendered {source.candidate.name}: {error}"
            ) from error
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

    @cache  # probes in several places end alike
    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(ids: list[int]) -> str:
        return str(backend.decode(ids, skip_special_tokens=False))

    return lambda stops: Judge(referee, encode, decode, controls, frozenset(stops), encoder.eos_id)


_THOUGHT = "Hmmm"
_DATES = (datetime(2001, 2, 3, 4, 5), datetime(2012, 11, 10, 9, 8))
_SECOND = "the second"
_LOOK_CALL = ("look", {"at": "the door"})
_QUESTION, _NEXT_QUESTION, _ANSWER = user_message("Why?"), user_message("And?"), assistant_message()
_REASONED_ANSWER, _CALL = assistant_message(thought=_THOUGHT), call_message(_LOOK_CALL, thought=_THOUGHT)
_RESULT = result_message([{"text": "Open."}])
_TWO_CALLS = call_message(_LOOK_CALL, ("find", {"it": _SECOND}))


def thinking(rendering: Rendering) -> Thinking:
    """Return what the template does with the reasoning of earlier answers."""
    if _THOUGHT in _rendered(rendering, [_QUESTION, _REASONED_ANSWER, _NEXT_QUESTION]):
        return Thinking.KEPT
    if _THOUGHT in _rendered(rendering, [_QUESTION, _CALL, _RESULT]):
        return Thinking.STRIPPED
    last = (_rendered(rendering, [_QUESTION, turn], prompt=False) for turn in (_REASONED_ANSWER, _CALL))
    return Thinking.ALWAYS_STRIPPED if any(_THOUGHT in text for text in last) else Thinking.NOT_SHOWN


def rewrites(source: str, variables: Mapping[str, Any], rendering: Rendering, *, tools: bool) -> Iterator[str]:
    """Yield a description of each rewrite by the template.

    Args:
        source: Source of the template.
        variables: The template's arguments.
        rendering: The compiled template.
        tools: Whether the template shows calls and results.
    """
    if tools:
        yield "calls: a call in the history is rebuilt from its parsed arguments"
        if rendering.message_format.arguments == "mapping" and _collapses_calls(rendering):
            yield "calls: of several calls in one message only the first is shown"
    specs, rounds = (TOOLS, [[_CALL, _RESULT]]) if tools else (rendering.default_tools, [])
    heads = {_until_first_question(rendering, specs, later) for later in ([], [_ANSWER, _NEXT_QUESTION], *rounds)}
    if len(heads - {""}) > 1:
        yield f"{HEAD}: what it writes before the first question, such as the tools, changes once more messages follow"
    elif not _begins_with_prompt(rendering):
        yield "prompt: what it writes at the end of a prompt is not what it writes before the answer in the history"
    if "strftime_now" in source and _is_dated(source, variables):  # skip compiling it twice if not needed
        yield "date: the prompt holds the day or time, frozen for as long as the template lives"


def _is_dated(source: str, variables: Mapping[str, Any]) -> bool:
    dated = (Rendering.of(source, variables, now) for now in _DATES)
    return str.__ne__(*(rendering.of_messages([_QUESTION], tool_specs=rendering.default_tools) for rendering in dated))


def _rendered(rendering: Rendering, turns: Messages, specs: Sequence[ToolSpec] = TOOLS, prompt: bool = True) -> Traced:
    try:
        return rendering.of_messages(turns, tool_specs=specs, generation_prompt=prompt)
    except TemplateError:
        return Traced()


def _begins_with_prompt(rendering: Rendering) -> bool:
    tools = rendering.default_tools
    prompt = rendering.of_messages([_QUESTION], tool_specs=tools)
    return str.startswith(rendering.of_messages([_QUESTION, _ANSWER, _NEXT_QUESTION], tool_specs=tools), prompt)


def _until_first_question(rendering: Rendering, specs: Sequence[ToolSpec], later: Messages) -> str:
    text = _rendered(rendering, [_QUESTION, *later], specs)
    return str.__getitem__(text, slice(0, max((span[1] for span in content_spans(text, 0)), default=0)))


def _collapses_calls(rendering: Rendering) -> bool:
    text = _rendered(rendering, [_QUESTION, _TWO_CALLS], prompt=False)
    return bool(text) and _SECOND not in text
