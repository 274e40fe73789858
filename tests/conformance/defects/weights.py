"""Defects of servers whose weights change: what an answer that was under way, and the next one, name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect
from strands_tito.testing import EngineState
from strands_tito.testing.running import Running
from strands_tito.testing.settle import Settled
from tito_sglang.scripted import generate as sglang
from tito_vllm.scripted import generate as vllm

NAMED = ("vllm", "sglang")
"""Wires whose answers name weight versions."""
Spans = list[tuple[str, int, int]]


def _told(change: Callable[[Spans], Spans]) -> Callable[[], AbstractContextManager[Any]]:
    """Change the spans of answers under which weights changed."""

    def spans(self: Running, answer: Settled) -> Settled:
        truly = _TRULY(self, answer)
        told = truly.said.weight_versions
        if told is None or len(told) < 2:
            return truly
        return replace(truly, said=replace(truly.said, weight_versions=change(list(told))))

    return lambda: mock.patch.object(Running, "spans", spans)


_TRULY = Running.spans


def _nothing(self: EngineState, version: str) -> None:
    """Change nothing."""


def _never_named() -> AbstractContextManager[Any]:
    return mock.patch.object(EngineState, "set_version", _nothing)


def _named_at_once() -> AbstractContextManager[Any]:
    """Give the new version to whatever was under way, all of it."""

    def set_version(self: EngineState, version: str) -> None:
        self.weight_version = version

    return mock.patch.object(EngineState, "set_version", set_version)


@contextmanager
def _one_behind() -> Iterator[None]:
    """Name the version before the live one, in answers that no change ran into."""
    history: list[str] = ["default"]

    def spans(state: EngineState, answer: Settled) -> list[dict[str, Any]]:
        if history[-1] != state.weight_version:
            history.append(state.weight_version)
        told = answer.said.weight_versions
        if told is None:
            told = [(history[-2] if len(history) > 1 else history[-1], 0, len(answer.output_ids))]
        return [{"version": version, "start": start, "end": end} for version, start, end in told]

    name = "version_spans"
    with mock.patch.object(vllm, name, spans), mock.patch.object(sglang, name, spans):
        yield


def _early(spans: Spans) -> Spans:
    (old, start, _), (new, _, end) = spans[0], spans[-1]
    return [(old, start, 1), (new, 1, end)]


def _late(spans: Spans) -> Spans:
    (old, start, _), (new, _, end) = spans[0], spans[-1]
    return [(old, start, end - 1), (new, end - 1, end)]


def _gap(spans: Spans) -> Spans:
    (old, start, end), *rest = spans
    return [(old, start, end - 1), *rest]


def _exchanged(spans: Spans) -> Spans:
    names = [name for name, _, _ in spans][::-1]
    return [(name, start, end) for name, (_, start, end) in zip(names, spans, strict=True)]


WEIGHTS = (
    Defect("weights-never-named", 10, "New weights go by the old ones' name.",
           client=_never_named, wires=NAMED, weights=True),
    Defect("weights-named-at-once", 10, "An answer under way is said to be all of the new weights.",
           client=_named_at_once, wires=NAMED, weights=True),
    Defect("weights-named-late", 10, "Answers name the weights before the live ones.",
           client=_one_behind, wires=NAMED, weights=True),
    Defect("weights-boundary-early", 10, "The new weights are said to begin earlier than they did.",
           client=_told(_early), wires=NAMED, weights=True),
    Defect("weights-boundary-late", 10, "The new weights are said to begin later than they did.",
           client=_told(_late), wires=NAMED, weights=True),
    Defect("weights-gap", 10, "A token at the change belongs to no weights.",
           client=_told(_gap), wires=NAMED, weights=True),
    Defect("weights-exchanged", 10, "The names of the two weights are exchanged.",
           client=_told(_exchanged), wires=NAMED, weights=True),
)  # fmt: skip
"""Defects of version spans where weights change."""
