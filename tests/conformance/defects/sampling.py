"""Defects of the sampler, of aborts, and lies that are told everywhere alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from conformance.defects.answer_views import View
from conformance.defects.defect import Defect, Wrap
from strands_tito.testing import Completion, Script, ScriptedEngine, ScriptedRequest

Change = Callable[[ScriptedRequest], ScriptedRequest]
ORDINARY = range(1_000, 40_000)
"""Ids that a blind sampler picks from."""


class Changed:
    """A script that samples with other parameters than were sent, and scores as before."""

    def __init__(self, script: Any, change: Change) -> None:
        self.script, self.change = script, change
        self.score, self.top = script.score, script.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        completion: Completion = self.script(self.change(request))
        return completion


class Blind(Changed):
    """A script in which a share of the tokens is drawn from the whole vocabulary."""

    def __init__(self, script: Any, share: float) -> None:
        super().__init__(script, lambda request: request)
        self._share, self._random = share, Random(5)

    def __call__(self, request: ScriptedRequest) -> Completion:
        completion = super().__call__(request)
        if request.temperature == 0 or request.grammar is not None:
            return completion
        ids = list(completion.output_ids)
        *before, last = ids or [0]
        changed = [self._random.choice(ORDINARY) if self._random.random() < self._share else each for each in before]
        return replace(completion, output_ids=[*changed, last] if ids else ids)


class Lying(Changed):
    """A script whose every logprob is something else than the logarithm of the probability."""

    def __init__(self, script: Any, lie: Callable[[float], float]) -> None:
        super().__init__(script, lambda request: request)
        self.lie = lie
        self.score, self.top = self._score, self._top

    def _score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        return [self.lie(value) for value in self.script.score(ids, start, temperature)]

    def _top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        return [(token, self.lie(value)) for token, value in self.script.top(ids, position, k, temperature)]


def _sampling(change: Change) -> Wrap:
    return lambda script: Changed(script, change)


def _hot(change: Change) -> Wrap:
    """Change requests that sample at all."""
    return _sampling(lambda request: change(request) if request.temperature > 0 else request)


def _lying(lie: Callable[[float], float]) -> Wrap:
    return lambda script: Lying(script, lie)


def _blind(share: float) -> Callable[[Script], Script]:
    return lambda script: Blind(script, share)


def _length_at_the_limit(view: View, request: ScriptedRequest) -> None:
    if len(view.ids) == request.max_new_tokens:
        view.finish = "length"


def _aborting(matches: bool) -> Callable[[ScriptedEngine], None]:
    """Let an abort end every request, or none."""

    def spoil(engine: ScriptedEngine) -> None:
        abort = engine.state.abort
        engine.state.abort = lambda _: abort(lambda _: matches)

    return spoil


SAMPLING = (
    Defect("greedy-always", 4, "Every answer is greedy.", wrap=_sampling(lambda r: replace(r, temperature=0.0))),
    Defect("top-k-forced", 4, "top_k is 4 whatever was sent.", wrap=_hot(lambda r: replace(r, top_k=4))),
    Defect(
        "top-p-95",
        4,
        "top_p is 0.95 unless another is sent.",
        wrap=_hot(lambda r: replace(r, top_p=min(r.top_p, 0.95))),
    ),
    Defect("seeds-alike", 4, "All seeds are alike.", wrap=_hot(lambda r: r if r.seed is None else replace(r, seed=1))),
    Defect(
        "seeds-modulo-4",
        4,
        "Only two bits of a seed count.",
        wrap=_hot(lambda r: r if r.seed is None else replace(r, seed=r.seed % 4)),
    ),
    Defect("top-p-forced", 4, "top_p is 0.9 whatever was sent.", wrap=_hot(lambda r: replace(r, top_p=0.9))),
    Defect(
        "hotter",
        4,
        "The temperature is a quarter higher.",
        wrap=_hot(lambda r: replace(r, temperature=r.temperature * 1.25)),
    ),
    Defect(
        "colder",
        4,
        "The temperature is a quarter lower.",
        wrap=_hot(lambda r: replace(r, temperature=r.temperature * 0.75)),
    ),
    Defect(
        "temperature-squared",
        4,
        "The temperature is squared.",
        wrap=_hot(lambda r: replace(r, temperature=r.temperature**2)),
    ),
    Defect("temperature-one", 4, "Whatever samples does so at 1.", wrap=_hot(lambda r: replace(r, temperature=1.0))),
    Defect(
        "top-k-one-more",
        4,
        "top_k leaves one more.",
        wrap=_hot(lambda r: replace(r, top_k=r.top_k + 1 if r.top_k > 0 else r.top_k)),
    ),
    Defect(
        "top-k-one-less",
        4,
        "top_k leaves one less.",
        wrap=_hot(lambda r: replace(r, top_k=r.top_k - 1 if r.top_k > 1 else r.top_k)),
    ),
    Defect("top-p-ignored", 4, "top_p is ignored.", wrap=_hot(lambda r: replace(r, top_p=1.0))),
    Defect("min-p-ignored", 4, "min_p is ignored.", wrap=_hot(lambda r: replace(r, min_p=0.0))),
    Defect(
        "unseeded-alike",
        4,
        "Requests without a seed have one.",
        wrap=_hot(lambda r: replace(r, seed=0) if r.seed is None else r),
    ),
    Defect(
        "few-seeds",
        4,
        "Requests without a seed have one of seven.",
        wrap=_hot(lambda r: replace(r, seed=r.number % 7) if r.seed is None else r),
    ),
    Defect("blind", 4, "Tokens are drawn from the whole vocabulary.", wrap=_blind(1.0)),
    Defect("blind-sometimes", 4, "One token in forty is drawn from the whole vocabulary.", wrap=_blind(0.025)),
    Defect("logprobs-base-10", 4, "Every logprob is to base 10.", wrap=_lying(lambda value: value / math.log(10))),
    Defect("logprobs-base-2", 4, "Every logprob is to base 2.", wrap=_lying(lambda value: value / math.log(2))),
    Defect("logprobs-clamped", 4, "No logprob is below -4.", wrap=_lying(lambda value: max(value, -4.0))),
    Defect("length-at-the-limit", 4, "An end of turn at the limit is reported as length.", edit=_length_at_the_limit),
    Defect("abort-ignored", 5, "An abort is accepted and ignored.", spoil=_aborting(False), wires=("vllm", "sglang")),
    Defect("abort-kills-all", 5, "An abort ends every request.", spoil=_aborting(True), wires=("vllm", "sglang")),
)
"""Defects of sampling, of aborts, and lies that are told everywhere alike."""
