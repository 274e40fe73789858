"""Defects where the suite had stopped comparing without saying so: late stages, ends, and values it never sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.defects.stranger_hooks import (
    as_kind,
    on_answer,
    on_policy,
    on_request,
    on_sampler,
    on_view,
    params_of,
    rescored,
    streamed,
    with_ids,
    with_params,
)
from tito_conformance.testing import Completion, ScriptedRequest, Settled
from tito_conformance.testing.script import token_of


@on_policy(4, "a cache that goes wrong after hours")
def late_wrong_prompt(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """From request 300 on, after the conversations, answers are those of a prompt with another ninth token."""
    prompt = request.prompt_ids
    if request.number < 300 or len(prompt) < 12 or request.grammar is not None:
        return policy(request)  # type: ignore[no-any-return]
    seen = replace(request, prompt_ids=(*prompt[:8], prompt[9], *prompt[9:]))
    found: Completion = policy(seen)
    return rescored(policy, seen, found.output_ids, found)


@on_answer(5, "an abort that hits the wrong slot", wires=("vllm", "sglang"))
def unasked_abort(memory: Any, answer: Settled) -> Settled:
    """After an abort, the next whole answer is cut after its first token."""
    before, memory.aborts = getattr(memory, "aborts", 0), len(memory.engine.aborted)
    if memory.aborts == before or streamed(answer.request) or len(answer.output_ids) < 2:
        memory.aborts = before if streamed(answer.request) else memory.aborts
        return answer
    return with_ids(answer, answer.output_ids[:1], finish="abort", stop=None)


@on_answer(4, "an end that is derived from the request")
def stop_string_claimed(memory: Any, answer: Settled) -> Settled:
    """A truncated answer is said to have ended by a stop string."""
    stops = answer.request.stop
    return replace(answer, finish="stop", stop=stops[-1]) if stops and answer.finish == "length" else answer


@on_request(4, "a seed in 31 bits")
def seed_of_31_bits(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Only 31 bits of a seed count."""
    return request if request.seed is None else replace(request, seed=request.seed % 2**31)


@on_request(4, "stop strings compared as ASCII")
def stops_of_ascii_alone(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Stop strings that are not ASCII are ignored."""
    return replace(request, stop=tuple(each for each in request.stop if each.isascii()))


@dataclass(frozen=True, slots=True)
class _OverPrompt(ScriptedRequest):
    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        presence = float(params_of(self).get("presence_penalty") or 0)
        found, own = ScriptedRequest.offsets(self, output), {token_of(token) for token in output}
        new = {token for token in self.prompt_ids if token not in own} if presence else set[int]()
        return found | {token: found.get(token, 0.0) - presence for token in new}


@on_request(4, "masks made of prompt and answer", wrap=lambda script: script.with_weights(alphabet=None))
def presence_counts_the_prompt(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A presence penalty counts the tokens of the prompt, too; of 49,152 tokens hardly one comes again."""
    return as_kind(_OverPrompt, request)


@dataclass(frozen=True, slots=True)
class _Capped(ScriptedRequest):
    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        counts = Counter(output)
        return ScriptedRequest.offsets(self, [token for token in counts for _ in range(min(counts[token], 3))])


@on_request(4, "counts in two bits")
def occurrences_to_three(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A frequency penalty counts three occurrences at most."""
    return as_kind(_Capped, request)


@on_request(4, "a range that is clamped without a word")
def bias_to_five(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A logit_bias is clamped to 5."""
    bias: Mapping[str, float] = params_of(request).get("logit_bias") or {}
    return with_params(request, logit_bias={token: max(-5.0, min(5.0, value)) for token, value in bias.items()})


@on_request(4, "a range that is clamped without a word")
def temperature_to_1_2(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Temperatures above 1.2 are 1.2."""
    return replace(request, temperature=min(request.temperature, 1.2))


@on_request(4, "a parameter with one decimal")
def temperature_rounded(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Temperatures are rounded to one decimal."""
    return replace(request, temperature=round(request.temperature, 1))


@on_request(4, "a model's generation_config.json")
def top_k_20_by_default(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """top_k is 20 where none is sent."""
    return replace(request, top_k=request.top_k if request.top_k > 0 else 20)


@on_sampler(4, "a bias of the end of a turn")
def ends_halved(draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, moved: Any) -> int:
    """An end of turn is half as likely as reported."""
    token: int = draw(context, request, noise, eos, {**moved, **{each: moved.get(each, 0.0) - 0.69 for each in eos}})
    return token


@on_request(4, "a model's generation_config.json")
def top_p_97_by_default(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """top_p is 0.97 where none is sent."""
    return replace(request, top_p=request.top_p if request.top_p < 1 else 0.97)


@on_request(4, "a range that is clamped without a word")
def top_p_from_0_2(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A top_p below 0.2 is 0.2."""
    return replace(request, top_p=max(request.top_p, 0.2))


@on_sampler(4, "a step whose random numbers are not drawn")
def every_twelfth_greedy(draw: Any, step: int, context: int, request: ScriptedRequest, *rest: Any) -> int:
    """Every twelfth token of an answer is greedy."""
    token: int = draw(context, replace(request, temperature=0.0) if step % 12 == 11 else request, *rest)
    return token


@on_view(4, "a table that is allocated and not filled")
def top_with_sentinels(view: Any, request: ScriptedRequest) -> None:
    """Of more than 10 likely tokens, all but the sampled one and the likeliest 8 have the logprob -9999."""
    rows = zip(view.top or [], view.ids, strict=False)
    found = [
        [(token, value if at < 8 or token == own else -9999.0) for at, (token, value) in enumerate(row)]
        for row, own in rows
    ]
    if found and len(found[0]) > 10:
        view.top = found


UNCOMPARED = (
    late_wrong_prompt,
    unasked_abort,
    stop_string_claimed,
    seed_of_31_bits,
    stops_of_ascii_alone,
    occurrences_to_three,
    presence_counts_the_prompt,
    bias_to_five,
    temperature_to_1_2,
    temperature_rounded,
    top_k_20_by_default,
    ends_halved,
    top_p_97_by_default,
    top_p_from_0_2,
    every_twelfth_greedy,
    top_with_sentinels,
)
