"""Defects of the sampler, of aborts, and lies that are the same everywhere."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect, Wrap
from conformance.defects.views import View
from tito_conformance.testing import Completion, Script, ScriptedEngine, ScriptedRequest

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


class Stopping(Changed):
    """A script that ends an answer at its first stop id, whatever `min_new_tokens` is."""

    def __init__(self, script: Any) -> None:
        super().__init__(script, lambda request: replace(request, min_new_tokens=0))

    def __call__(self, request: ScriptedRequest) -> Completion:
        completion = super().__call__(request)
        if completion.output_ids and completion.output_ids[-1] in request.stop_ids:
            return replace(completion, finish="stop", stop=completion.output_ids[-1])
        return completion


class Forgetful(Changed):
    """A script that samples and reports by a changed prompt, and scores by the whole one."""

    def __call__(self, request: ScriptedRequest) -> Completion:
        completion, prompt = super().__call__(request), self.change(request).prompt_ids
        if request.scoring or request.grammar is not None or not completion.output_ids:
            return completion
        ids = (*prompt, *completion.output_ids)
        return replace(completion, logprobs=self.script.score(ids, len(prompt), request.reported_temperature))


class Noisy(Changed):
    """A script whose every answer is reported with an error of its own, the same for all its tokens."""

    def __init__(self, script: Any, nats: float) -> None:
        super().__init__(script, lambda request: request)
        self._nats, self._random = nats, Random(6)

    def __call__(self, request: ScriptedRequest) -> Completion:
        completion = super().__call__(request)
        params = request.body.get("sampling_params") or request.body
        listed = request.body.get("top_logprobs_num") or params.get("logprobs")
        if request.scoring or request.grammar is not None or not completion.output_ids or listed:
            return completion
        ids, start = (*request.prompt_ids, *completion.output_ids), len(request.prompt_ids)
        off = self._nats * self._random.choice((-1, 1))
        plain = self.script.score(ids, start, request.reported_temperature)
        return replace(completion, logprobs=[min(0.0, value + off) for value in plain])


class Piecewise(Changed):
    """A script that samples the tokens from `start` to `stop` of an answer by a changed request."""

    def __init__(self, script: Any, change: Change, start: int, stop: int) -> None:
        super().__init__(script, change)
        self._start, self._stop = start, stop

    def __call__(self, request: ScriptedRequest) -> Completion:
        if request.temperature == 0 or request.grammar is not None or request.scoring or request.number < 40:
            return self.script(request)
        ids: list[int] = []
        for start, stop in ((0, self._start), (self._start, self._stop), (self._stop, request.max_new_tokens)):
            limit = min(stop, request.max_new_tokens) - start
            if limit <= 0 or (ids and ids[-1] in request.stop_ids):
                continue
            least = max(0, request.min_new_tokens - len(ids))
            seed = None if request.seed is None else request.seed + 1_000 * start
            number = request.number + 100_000 * start
            part = replace(request, prompt_ids=(*request.prompt_ids, *ids), max_new_tokens=limit, min_new_tokens=least)
            part = replace(part, seed=seed, number=number)
            ids += self.script(self.change(part) if start == self._start else part).output_ids
        return Completion(ids)


def _boosting_ends(script: Any) -> Script:
    """Sample with an end of turn three times as likely as scored."""
    other = script.with_weights(eos_weight=12.0)
    return Changed(_Scored(other, script), lambda request: request)


class _Scored:
    """One script's samples with another's scores."""

    def __init__(self, sampler: Any, scorer: Any) -> None:
        self._sampler, self.score, self.top = sampler, scorer.score, scorer.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        completion: Completion = self._sampler(request)
        return completion


def _without(*names: str) -> Change:
    """Drop fields of a request's body that the policy reads."""

    def change(request: ScriptedRequest) -> ScriptedRequest:
        params = {name: value for name, value in request.body.items() if name not in names}
        inner = params.get("sampling_params")
        if isinstance(inner, dict):
            params["sampling_params"] = {name: value for name, value in inner.items() if name not in names}
        return replace(request, body=params)

    return change


def _if(condition: Callable[[ScriptedRequest], bool], change: Change) -> Wrap:
    return _hot(lambda request: change(request) if condition(request) else request)


def _at(temperature: float) -> Change:
    return lambda request: replace(request, temperature=request.temperature * temperature)


def _aborting_late(engine: ScriptedEngine) -> None:
    """Let an abort take effect when half of the answer has come."""
    abort, tasks = engine.state.abort, set[asyncio.Task[None]]()

    async def at_half(matches: Callable[[ScriptedRequest], bool]) -> None:
        for run in [each for each in engine._active if any(map(matches, each.requests))]:
            while run in engine._active and run.emitted() < run.tokens // 2:  # by tokens: a busy machine samples slower
                await asyncio.sleep(0.001)
        abort(matches)

    def late(matches: Callable[[ScriptedRequest], bool]) -> int:
        tasks.add(asyncio.get_running_loop().create_task(at_half(matches)))
        return 1

    engine.state.abort = late


def _length_at_the_limit(view: View, request: ScriptedRequest) -> None:
    if len(view.ids) == request.max_new_tokens:
        view.finish = "length"


def _few_stops(kept: slice) -> AbstractContextManager[Any]:
    """Look for some of a request's stop ids only."""

    def stop_ids(request: ScriptedRequest) -> frozenset[int]:
        return frozenset(request.stop_token_ids[kept]) | (frozenset() if request.ignore_eos else {*request.eos_ids})

    return mock.patch.object(ScriptedRequest, "stop_ids", property(stop_ids))


def _aborting(matches: bool) -> Callable[[ScriptedEngine], None]:
    """Let an abort end every request, or none."""

    def spoil(engine: ScriptedEngine) -> None:
        abort = engine.state.abort
        engine.state.abort = lambda _: abort(lambda _: matches)

    return spoil


SAMPLING = (
    Defect("greedy-always", 4, "Every answer is greedy.", wrap=_sampling(lambda r: replace(r, temperature=0.0))),
    Defect("top-k-forced", 4, "top_k is 4 whatever was sent.", wrap=_hot(lambda r: replace(r, top_k=4))),
    Defect("top-p-95", 4, "top_p is 0.95 unless another is sent.",
        wrap=_hot(lambda r: replace(r, top_p=min(r.top_p, 0.95)))),
    Defect("seeds-modulo-4", 4, "Only two bits of a seed count.",
        wrap=_hot(lambda r: r if r.seed is None else replace(r, seed=r.seed % 4))),
    Defect(
        "temperature-squared",
        4,
        "The temperature is squared.",
        # Nearer to 0 the scripted policy's weights overflow, and the suite would only see a crash.
        wrap=_hot(lambda r: replace(r, temperature=max(r.temperature**2, min(r.temperature, 0.05)))),
    ),
    Defect("temperature-one", 4, "Whatever samples does so at 1.", wrap=_hot(lambda r: replace(r, temperature=1.0))),
    Defect("top-k-one-more", 4, "top_k leaves one more.",
        wrap=_hot(lambda r: replace(r, top_k=r.top_k + 1 if r.top_k > 0 else r.top_k))),
    Defect("top-p-ignored", 4, "top_p is ignored.", wrap=_hot(lambda r: replace(r, top_p=1.0))),
    Defect("few-seeds", 4, "Requests without a seed have one of seven.",
        wrap=_hot(lambda r: replace(r, seed=r.number % 7) if r.seed is None else r)),
    Defect("blind-sometimes", 4, "One token in forty is drawn from the whole vocabulary.",
        wrap=lambda script: Blind(script, 0.025)),
    Defect("logprobs-base-2", 4, "Every logprob is to base 2.", wrap=_lying(lambda value: value / math.log(2))),
    Defect("logprobs-clamped", 4, "No logprob is below -4.", wrap=_lying(lambda value: max(value, -4.0))),
    Defect("length-at-the-limit", 4, "An end of turn at the limit is reported as length.", edit=_length_at_the_limit),
    Defect("a-tenth-colder", 4, "The temperature is a tenth lower.", wrap=_hot(_at(0.9))),
    Defect("a-fifth-hotter", 4, "The temperature is a fifth higher.", wrap=_hot(_at(1.2))),
    Defect("first-token-greedy", 4, "The first token of each answer is greedy.",
        wrap=lambda script: Piecewise(script, lambda r: replace(r, temperature=0.0), 0, 1)),
    Defect("later-tokens-hot", 4, "The temperature is 1.5 after 16 tokens of an answer.",
        wrap=lambda script: Piecewise(script, _at(1.5), 16, 10_000)),
    Defect("ends-boosted", 4, "An end of turn is three times as likely as reported.", wrap=_boosting_ends),
    Defect("streamed-colder", 4, "Streamed requests are sampled at half the temperature.",
        wrap=_if(lambda r: bool(r.body.get("stream")), _at(0.5))),
    Defect("long-prompts-hotter", 4, "After 512 tokens of prompt the temperature is twice as high.",
        wrap=_if(lambda r: len(r.prompt_ids) > 512, _at(2.0))),
    Defect("long-prompts-greedy", 4, "After 1,024 tokens of prompt every answer is greedy.",
        wrap=_if(lambda r: len(r.prompt_ids) > 1_024, _at(0.0))),
    Defect("penalties-greedy-alone", 4, "Penalties are ignored except at temperature 0.",
        wrap=_hot(_without("presence_penalty", "frequency_penalty"))),
    Defect("presence-alone", 4, "The frequency penalty is ignored.", wrap=_sampling(_without("frequency_penalty"))),
    Defect("first-stop-only", 4, "Only the first stop id of a request counts.", client=lambda: _few_stops(slice(0, 1))),
    Defect("last-stop-only", 4, "Only the last stop id of a request counts.",
        client=lambda: _few_stops(slice(-1, None))),
    Defect("bias-ignored", 4, "A logit_bias is ignored.", wrap=_sampling(_without("logit_bias"))),
    Defect("top-p-before-top-k", 4, "Of top_k and top_p only top_k counts.",
        wrap=_hot(lambda r: replace(r, top_p=1.0) if r.top_k > 0 else r)),
    Defect("top-k-3-is-2", 4, "A top_k above 2 leaves one less.",
        wrap=_hot(lambda r: replace(r, top_k=r.top_k - 1) if r.top_k > 2 else r)),
    Defect("min-p-halved", 4, "min_p is halved.", wrap=_hot(lambda r: replace(r, min_p=r.min_p / 2))),
    Defect("min-tokens-rarely-tested", 4, "min_new_tokens is ignored by a policy that seldom ends.",
        wrap=lambda script: Stopping(script.with_weights(eos_weight=0.05))),
    Defect("noise-of-an-answer", 4, "All logprobs of an answer are 0.04 too high or too low.",
        wrap=lambda script: Noisy(script, 0.04)),
    Defect("beginning-forgotten", 4, "Answers depend on the last 24 tokens of a prompt only.",
        wrap=lambda script: Forgetful(script, lambda r: replace(r, prompt_ids=r.prompt_ids[-24:]))),
    Defect("abort-late", 5, "An abort takes effect late.", spoil=_aborting_late, wires=("vllm", "sglang")),
    Defect("abort-ignored", 5, "An abort is accepted and ignored.", spoil=_aborting(False), wires=("vllm", "sglang")),
    Defect("abort-kills-all", 5, "An abort ends every request.", spoil=_aborting(True), wires=("vllm", "sglang")),
)  # fmt: skip
"""Defects of sampling, of aborts, and lies that are the same everywhere."""
