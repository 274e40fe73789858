"""Defects of version spans when weights change, in the current answer and in later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect
from tito_conformance.testing import (
    Completion,
    EngineState,
    ScriptedEngine,
    ScriptedRequest,
    sglang_answers,
    vllm_answers,
)
from tito_conformance.testing.engine import Running
from tito_conformance.testing.script import Settled, reported

VERSIONED = ("vllm", "sglang")
"""Wires that report weight versions."""
Spans = list[tuple[str, int, int]]


def _changed_spans(change: Callable[[Spans], Spans]) -> Callable[[], AbstractContextManager[Any]]:
    """Change the version spans of answers during which the weights changed."""

    def spans(self: Running, answer: Settled) -> Settled:
        original = _ORIGINAL(self, answer)
        versions = original.completion.weight_versions
        if versions is None or len(versions) < 2:
            return original
        return replace(original, completion=replace(original.completion, weight_versions=change(list(versions))))

    return lambda: mock.patch.object(Running, "spans", spans)


_ORIGINAL = Running.spans


def _ignored(self: EngineState, name: str) -> None:
    """Do nothing."""


def _never_reported() -> AbstractContextManager[Any]:
    return mock.patch.object(EngineState, "set_version", _ignored)


def _reported_at_once() -> AbstractContextManager[Any]:
    """Report the new version for all tokens of answers in progress."""

    def set_version(self: EngineState, version: str) -> None:
        self.weight_version = version

    return mock.patch.object(EngineState, "set_version", set_version)


@contextmanager
def _one_behind() -> Iterator[None]:
    """Report the version before the current one, in answers without a weight update."""
    history: list[str] = ["default"]

    def spans(state: EngineState, answer: Settled) -> list[dict[str, Any]]:
        if history[-1] != state.weight_version:
            history.append(state.weight_version)
        versions = answer.completion.weight_versions
        if versions is None:
            versions = [(history[-2] if len(history) > 1 else history[-1], 0, len(answer.output_ids))]
        return [{"version": version, "start": start, "end": end} for version, start, end in versions]

    name = "version_spans"
    with mock.patch.object(vllm_answers, name, spans), mock.patch.object(sglang_answers, name, spans):
        yield


def _early(spans: Spans) -> Spans:
    (old, start, _), (new, _, end) = spans[0], spans[-1]
    return [(old, start, 1), (new, 1, end)]


def _late(spans: Spans) -> Spans:
    (old, start, _), (new, _, end) = spans[0], spans[-1]
    return [(old, start, end - 1), (new, end - 1, end)]


def _exchanged(spans: Spans) -> Spans:
    names = [name for name, _, _ in spans][::-1]
    return [(name, start, end) for name, (_, start, end) in zip(names, spans, strict=True)]


def _never_pausing() -> AbstractContextManager[Any]:
    return mock.patch.object(EngineState, "pause", return_value=None)


def _loading(load: Callable[[EngineState, str], None]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(EngineState, "load", load)


def _as_others(self: EngineState, folder: str) -> None:
    """Take other weights at each load."""
    self.weights += 1


def _never_clearing(engine: ScriptedEngine) -> None:
    engine.state.cache.clear = lambda: None  # type: ignore[method-assign]


class _Remembering:
    """A script that reads a prompt by the weights that read it first, and scores by the current ones."""

    def __init__(self, script: Any) -> None:
        self.script, self.score, self.top = script, script.score, script.top
        self._read: dict[tuple[int, ...], int] = {}

    def __call__(self, request: ScriptedRequest) -> Completion:
        weights = request.weights if request.scoring else self._read.setdefault(request.prompt_ids, request.weights)
        if weights == request.weights:
            return self.script(request)
        old = replace(request, weights=weights)
        done: Completion = self.script(old)
        ids = done.output_ids
        return replace(done, logprobs=reported(self.script, old, old.whole(ids), len(old.prompt_ids)))


WEIGHTS = (
    Defect("pause-ignored", 5, "A pause is accepted and ignored.", client=_never_pausing, weights=1),
    Defect("weights-never-named", 10, "New weights keep the old version.",
           client=_never_reported, wires=VERSIONED, weights=1),
    Defect("weights-named-at-once", 10, "An answer in progress reports only the new version.",
           client=_reported_at_once, wires=VERSIONED, weights=1),
    Defect("weights-named-late", 10, "Later answers report the previous version.",
           client=_one_behind, wires=VERSIONED, weights=1),
    Defect("weights-boundary-early", 10, "The span of the new version starts too early.",
           client=_changed_spans(_early), wires=VERSIONED, weights=1),
    Defect("weights-boundary-late", 10, "The span of the new version starts too late.",
           client=_changed_spans(_late), wires=VERSIONED, weights=1),
    Defect("weights-exchanged", 10, "The two versions are swapped.",
           client=_changed_spans(_exchanged), wires=VERSIONED, weights=1),
    Defect("weights-version-alone", 10, "A reload changes the version and no weights.",
           client=_loading(_ignored), weights=2),
    Defect("weights-never-the-same", 10, "A folder that is loaded again holds other weights.",
           client=_loading(_as_others), weights=2),
    Defect("weights-cache-counted", 10, "The prefix cache is not cleared at a reload.",
           spoil=_never_clearing, weights=2),
    Defect("weights-cache-kept", 10, "Keys and values of known prompts outlive a reload.",
           wrap=_Remembering, weights=2),
)  # fmt: skip
"""Defects of version spans when weights change."""
