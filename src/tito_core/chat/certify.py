"""Certification: try candidates on the probes, and choose the first that equals the template's own rendering."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tito_core.chat.cutting import content_spans, content_start, cut
from tito_core.chat.delta import CANDIDATES, Candidate, DeltaSource, Tail
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import Opened
from tito_core.chat.probes import Case, cases
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.traced import Traced

AROUND = 60
"""Characters shown around the first difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A probe on which a candidate's delta is not what the template writes."""

    candidate: str
    case: str
    expected: str
    found: str

    def __str__(self) -> str:
        at = next((i for i, (a, b) in enumerate(zip(self.expected, self.found, strict=False)) if a != b), None)
        at = min(len(self.expected), len(self.found)) if at is None else at
        window = slice(max(0, at - AROUND), at + AROUND)
        return (
            f"on the probe {self.case!r}, rendering {self.candidate} differs at character {at}:\n"
            f"  template: {self.expected[window]!r}\n"
            f"  delta:    {self.found[window]!r}"
        )


@dataclass(slots=True)
class Trial:
    """What the probes said of one candidate.

    Attributes:
        moved: Probes in which the template moves what was sampled to a later place.
    """

    source: DeltaSource
    passed: list[Case] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    difference: Difference | None = None

    @property
    def tools(self) -> bool:
        """Tell whether results of tools are right."""
        return any(case.calls and not case.beside for case in self.passed)


def choose(rendering: Rendering, encoder: ContentSafeEncoder, candidates: Sequence[Candidate] = CANDIDATES) -> Trial:
    """Give the first candidate that is right on all probes which the template takes.

    Raises:
        TemplateError: None is; the message shows the first difference of the one that came furthest.
    """
    trials: list[Trial] = []
    refusal: TemplateError | None = None
    for candidate in candidates:
        try:
            trial = attempt(DeltaSource.of(rendering, encoder, candidate), cases())
        except TemplateError as error:
            refusal = refusal or error
            continue
        if trial.difference is None:
            return trial
        trials.append(trial)
    if not trials:
        raise refusal or TemplateError("There is no candidate to try.")
    furthest = max(trials, key=lambda trial: len(trial.passed))
    raise TemplateError(
        "The chat template writes a message in another way in another place, so a turn's prompt cannot extend the "
        f"turn before it: {furthest.difference}\n"
        "Use a template that only adds to what it wrote, such as the training variant of this one."
    )


def attempt(source: DeltaSource, probes: Iterable[Case]) -> Trial:
    """Try one candidate on probes, up to the first difference.

    Raises:
        TemplateError: The template refuses the very first probe, which is a question and an answer.
    """
    trial = Trial(source)
    for case in probes:
        history = [*case.before, case.answered, *case.new]
        try:
            whole = source.rendering.of_messages(history, case.system, case.tools)
        except TemplateError as error:
            if not trial.passed and not case.calls:
                raise
            trial.refused.append((case.name, str(error)))
            continue
        try:
            tail = source.tail(case.answered, case.new, case.tools or (), case.before)
        except TemplateError as error:
            if case.beside and not trial.tools:  # it shows the text and not the calls beside it
                trial.refused.append((case.name, str(error)))
                continue
            trial.difference = Difference(source.candidate.name, case.name, str.__str__(whole), f"refused: {error}")
            return trial
        if _equal(whole, tail, len(case.before)) if case.opened is None else _closed(source, whole, tail, case):
            trial.passed.append(case)
        elif case.beside and _moves(whole, len(case.before), case.beside):
            trial.moved.append(case.name)
        else:
            trial.difference = _difference(source, case, whole, tail)
            return trial
    return trial


def _equal(whole: Traced, tail: Tail, source: int) -> bool:
    """Tell whether a whole rendering ends with the tail, right after the end of its own turn `source`."""
    found = cut(tail.text, tail.start)
    at = len(whole) - len(found)
    if at < 0 or str.__ne__(cut(whole, at), found) or _places(cut(whole, at)) != _places(found):
        return False
    # Where the turn ended in the minimal conversation (from its content on) it must end in the whole one.
    turn = content_start(tail.text, tail.source)
    ended = str.__getitem__(tail.text, slice(turn, tail.start))
    before = str.__getitem__(whole, slice(0, at))
    return before.endswith(ended) and any(stop <= at for _, stop, _ in content_spans(whole, source))


def _closed(source: DeltaSource, whole: Traced, tail: Tail, case: Case) -> bool:
    """Tell whether a whole rendering ends with the tail, and closes the turn that was cut off as we would."""
    found = cut(tail.text, tail.start)
    at = len(whole) - len(found)
    if at < 0 or str.__ne__(cut(whole, at), found):
        return False
    spans = content_spans(whole, len(case.before))
    if not spans:  # reasoning that the template strips before a question
        return True
    closers = tail.ending.closers.get(case.opened or Opened.MESSAGE)
    written = source.encoder.encode(cut(whole, spans[-1][1], at)).ids
    return closers is not None and closers.tolist() == written.tolist()


def _places(text: Traced) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop, _ in text.spans]


def _moves(whole: Traced, source: int, beside: str) -> bool:
    """Tell whether the template writes the text beside calls, which was sampled before them, after one of them."""
    spans = content_spans(whole, source)
    places = [i for i, (start, stop, _) in enumerate(spans) if str.__getitem__(whole, slice(start, stop)) == beside]
    return bool(places) and places[0] > 0


def _difference(source: DeltaSource, case: Case, whole: Traced, tail: Tail) -> Difference:
    """Compare from the end of the turn on, or, where the turn itself ends differently, from its beginning."""
    plain, shown = str.__str__(whole), str.__str__(tail.text)
    turn = content_start(tail.text, tail.source)
    at = plain.rfind(shown[turn : tail.start])
    if at >= 0:
        return Difference(source.candidate.name, case.name, plain[at + tail.start - turn :], shown[tail.start :])
    begin = min((start for start, _, _ in content_spans(whole, len(case.before))), default=0)
    return Difference(source.candidate.name, case.name, plain[begin:], shown[turn:])
