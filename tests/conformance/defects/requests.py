"""Defects that only unusual requests show: of several parameters, with a seed, after extreme ones, of long prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from conformance.defects.client import _calls, _patched
from conformance.defects.defect import Defect
from conformance.defects.stranger_hooks import (
    on_engine,
    on_request,
    on_view,
    params_of,
    rescored,
    streamed,
    with_params,
)
from conformance.defects.uncompared import UNCOMPARED
from tito_conformance.fixed import MAX_TOP
from tito_conformance.testing import Completion, ScriptedEngine, ScriptedRequest
from tito_core.backend import generate
from tito_core.turn import answer

ABORTING = ("vllm", "sglang")


@on_request(4, "stop strings compared with the text of one token")
def long_stop_strings_ignored(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Stop strings of more than two characters are ignored."""
    return replace(request, stop=tuple(each for each in request.stop if len(each) <= 2))


@on_request(4, "a field that is dropped without a word")
def repetition_penalty_ignored(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """repetition_penalty is ignored."""
    return with_params(request, repetition_penalty=1.0)


@on_request(4, "lengths counted with the prompt")
def min_tokens_counts_the_prompt(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """min_new_tokens counts the prompt's tokens, too, if there are many."""
    return replace(request, min_new_tokens=0) if len(request.prompt_ids) > 256 else request


@on_request(4, "a processor that streams do not have")
def bias_lost_in_streams(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A logit_bias is ignored in streams."""
    return with_params(request, logit_bias=None) if streamed(request) else request


@on_request(4, "a seed that streams do not have")
def seed_lost_in_streams(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """The seed is ignored in streams."""
    return replace(request, seed=None) if streamed(request) else request


@on_request(4, "a seed that is tested as a condition")
def seed_zero_is_none(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """The seed 0 counts as none."""
    return replace(request, seed=None) if request.seed == 0 else request


@on_request(4, "buffers of a batch that are not cleared")
def min_p_left(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A min_p stays in force for the next request."""
    before, memory.min_p = getattr(memory, "min_p", 0.0), request.min_p
    return request if request.min_p else replace(request, min_p=before)


@on_request(4, "buffers of a batch that are not cleared")
def presence_penalty_left(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A presence penalty stays in force for the next request."""
    own = params_of(request).get("presence_penalty")
    before, memory.presence = getattr(memory, "presence", 0.0), own
    return request if own else with_params(request, presence_penalty=before)


@on_engine(5, "an abort that is looked up in every second step", wires=ABORTING)
def every_second_abort_ignored(engine: ScriptedEngine) -> None:
    """Every second abort is accepted and ignored."""
    abort, calls = engine.state.abort, list[None]()

    def some(matches: Callable[[ScriptedRequest], bool]) -> int:
        calls.append(None)
        return abort(matches) if len(calls) % 2 else 0

    engine.state.abort = some


@on_view(4, "a detokenizer that strips", wires=("vllm-completions", "sglang"))
def first_blank_lost(view: Any, request: ScriptedRequest) -> None:
    """The text lacks its first blanks."""
    if view.text is not None:
        view.text = view.text.lstrip()


class Scoring:
    """A policy that scores prompts otherwise: `change(scores, those of the sequence before)`."""

    def __init__(self, inner: Any, change: Callable[[list[float], list[float]], list[float]]) -> None:
        self._inner, self._change, self._before = inner, change, list[float]()
        self.top = inner.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        found: Completion = self._inner(request)
        return found

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        own = self._inner.score(ids, start, temperature)
        if start > 1:  # of an answer
            return list(own)
        before, self._before = self._before, list(own)
        return self._change(list(own), before)


def _first_of_the_one_before(scores: list[float], before: list[float]) -> list[float]:
    count = min(16, len(before), len(scores))
    return [*before[:count], *scores[count:]]


def _at_a_boundary(size: int) -> Callable[[list[float], list[float]], list[float]]:
    return lambda scores, _: [each - 0.3 * ((at + 1) % size == 0) for at, each in enumerate(scores)]


class FirstIsZero(Scoring):
    """A policy whose prompt scores begin with 0; what it reports of sampled tokens is right."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, lambda scores, _: [0.0, *scores[1:]])

    def __call__(self, request: ScriptedRequest) -> Completion:
        found = super().__call__(request)
        right = request.scoring or request.grammar is not None
        return found if right else rescored(self._inner, request, found.output_ids, found)


def _rounded(original: Any) -> Any:
    def sendable(request: Any, *arguments: Any, **options: Any) -> Any:
        sent = original(request, *arguments, **options)
        if request.optional_outputs.top_logprobs <= MAX_TOP:  # not where agents ask for them
            return sent
        return replace(
            sent, sampling=sent.sampling.model_copy(update={"temperature": round(sent.sampling.temperature, 1)})
        )

    return sendable


def _in_53_bits(calls: tuple[Any, ...]) -> tuple[Any, ...]:
    def rounded(arguments: Any) -> Any:
        return {name: int(float(value)) if isinstance(value, int) else value for name, value in arguments.items()}

    return tuple(
        replace(call, arguments=rounded(call.arguments), arguments_text=None) if call.status.runs else call
        for call in calls
    )


def _stripped(calls: tuple[Any, ...]) -> tuple[Any, ...]:
    def strip(arguments: Any) -> Any:
        return {name: value.strip() if isinstance(value, str) else value for name, value in arguments.items()}

    return tuple(
        replace(call, arguments=strip(call.arguments), arguments_text=None) if call.status.runs else call
        for call in calls
    )


REQUESTS: tuple[Defect, ...] = (
    long_stop_strings_ignored,
    repetition_penalty_ignored,
    min_tokens_counts_the_prompt,
    bias_lost_in_streams,
    seed_lost_in_streams,
    seed_zero_is_none,
    min_p_left,
    presence_penalty_left,
    every_second_abort_ignored,
    first_blank_lost,
    Defect("scores-of-the-sequence-before", 4, "The first 16 scores are those of the sequence that was scored before.",
           wrap=lambda script: Scoring(script, _first_of_the_one_before)),
    Defect("scores-at-512", 4, "The score of the first token of each chunk of 512 is too low.",
           wrap=lambda script: Scoring(script, _at_a_boundary(512))),
    Defect("scores-at-2048", 4, "The score of the first token of each chunk of 2,048 is too low.",
           wrap=lambda script: Scoring(script, _at_a_boundary(2048))),
    Defect("client-rounds-temperatures-of-samples", 4, "The temperature is rounded where likely tokens are requested.",
           client=_patched(generate, "sendable", _rounded), wires=ABORTING),
    Defect("first-score-zero", 4, "The first score of every prompt is 0.",
           wrap=FirstIsZero),
    Defect("client-rounds-integers", 9, "Integers above 2^53 in arguments are rounded.",
           client=_patched(answer, "parse", _calls(_in_53_bits)), wires=ABORTING),
    Defect("client-strips-arguments", 9, "Blanks around the strings of arguments are lost.",
           client=_patched(answer, "parse", _calls(_stripped)), wires=ABORTING),
    *UNCOMPARED,
)  # fmt: skip
"""Defects that the suite did not see before its requests had every parameter."""
