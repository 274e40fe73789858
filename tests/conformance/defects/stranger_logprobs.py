"""The stranger's defects in the logprobs of sampled tokens."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any

from conformance.defects.defect import latency
from conformance.defects.stranger_hooks import LONG, VLLM, on_answer, on_request, streamed, with_logprobs
from tito_conformance.testing import ScriptedRequest, Settled
from tito_conformance.testing.script import mix64

_EOS_MASK = 0.08


def _bfloat16(value: float) -> float:
    [bits] = struct.unpack("I", struct.pack("f", value))
    [rounded] = struct.unpack("f", struct.pack("I", (bits + 0x8000) & 0xFFFF0000))
    return float(rounded)


@on_answer(4, "logits cast before log_softmax")
def bfloat16_when_long(memory: Any, answer: Settled) -> Settled:
    """After prompts of over 800 tokens, logprobs are rounded to bfloat16."""
    if len(answer.request.prompt_ids) <= LONG:
        return answer
    return with_logprobs(answer, [_bfloat16(value) for value in answer.logprobs])


@on_answer(4, "rollout logprobs one position off: ms-swift #8196")
def late_after_30(memory: Any, answer: Settled) -> Settled:
    """From token 30 on, as after a preemption, each token has the logprob of the one before."""
    values = list(answer.logprobs)
    return with_logprobs(answer, [*values[:30], *values[29:-1]] if len(values) > 30 else values)


@on_answer(4, "draft model's logprobs: vLLM #34497")
def every_20th_of_the_draft(memory: Any, answer: Settled) -> Settled:
    """The logprob of every 20th token is the draft model's, 5% off."""
    values = [value * 1.05 - 0.02 if n % 20 == 19 else value for n, value in enumerate(answer.logprobs)]
    return with_logprobs(answer, values)


@on_answer(4, "n-gram speculation returns 0.0: vLLM #17876")
def zero_where_speculated(memory: Any, answer: Settled) -> Settled:
    """A token that repeats a pair of ids of the prompt was speculated: its logprob is 0.0."""
    prompt, ids = answer.request.prompt_ids, (answer.request.prompt_ids[-1], *answer.output_ids)
    pairs = set(pairwise(prompt))
    guessed = [pair in pairs for pair in pairwise(ids)]
    return with_logprobs(answer, [0.0 if hit else lp for hit, lp in zip(guessed, answer.logprobs, strict=True)])


@on_request(11, "logprobs_mode that depends on the code path", wires=VLLM)
def processed_when_streamed(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A server of raw logprobs reports them at the request's temperature in streams."""
    if not streamed(request) or not request.temperature:
        return request
    return replace(request, reported_temperature=request.temperature)


@on_request(11, "logprobs before the temperature in one path only", wires=("sglang",))
def raw_when_streamed(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A server of processed logprobs reports raw ones in streams."""
    return replace(request, reported_temperature=1.0, reported_offsets=False) if streamed(request) else request


@on_request(11, "raw logprobs at low temperatures only")
def temperature_forgotten_below_half(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Processed logprobs do not include temperatures of 0.5 and less; raw ones do."""
    if not 0 < request.temperature <= 0.5:
        return request
    raw = request.reported_temperature == 1.0
    return replace(request, reported_temperature=request.temperature if raw else 1.0)


@on_answer(4, "argmax path reports 0.0: llama.cpp #27972 is its blatant form")
def zero_when_greedy(memory: Any, answer: Settled) -> Settled:
    """At temperature 0 every logprob is 0.0."""
    return answer if answer.request.temperature else with_logprobs(answer, [0.0] * len(answer.logprobs))


@on_request(11, "renormalised over the nucleus: NeMo-RL #3497, OpenPipe ART #140")
def renormalised_over_top_p(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """With `top_p` alone, logprobs are normalised over the nucleus, although the server reports them over all ids."""
    return replace(request, reported_truncated=True) if request.top_p < 1 and not request.top_k else request


@on_request(11, "penalties in raw logprobs", wires=VLLM)
def raw_with_penalties(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Raw logprobs include penalties and `logit_bias`."""
    return replace(request, reported_offsets=True)


@on_request(11, "penalties left out of processed logprobs", wires=("sglang",))
def processed_without_penalties(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Processed logprobs leave out penalties and `logit_bias`."""
    return replace(request, reported_offsets=False)


@on_answer(4, "clamped logprobs")
def floor_at_minus_four(memory: Any, answer: Settled) -> Settled:
    """Logprobs below -4 are reported as -4."""
    return with_logprobs(answer, [max(value, -4.0) for value in answer.logprobs])


@on_answer(4, "stale first logprob after a prefix-cache hit")
def first_stale_when_cached(memory: Any, answer: Settled) -> Settled:
    """After a hit of the prefix cache, the first token has the first logprob of the answer before."""
    prompt, known = answer.request.prompt_ids, memory.__dict__.setdefault("known", set())
    before, hit = getattr(memory, "before", None), prompt[:64] in known
    known.add(prompt[:64])
    memory.before = answer.logprobs[0] if answer.logprobs else before
    if before is None or not hit or not answer.logprobs:
        return answer
    return with_logprobs(answer, [before, *answer.logprobs[1:]])


@on_answer(4, "overlap scheduler: one step late, in streams")
def one_late_when_streamed(memory: Any, answer: Settled) -> Settled:
    """In streams each token has the logprob of the token before it; the first has its own."""
    values = answer.logprobs
    return with_logprobs(answer, [values[0], *values[:-1]]) if streamed(answer.request) and values else answer


@on_answer(4, "verification tree order against sequence order (EAGLE)")
def pairs_swapped_past_16(memory: Any, answer: Settled) -> Settled:
    """Past token 16, the logprobs of every fourth pair of neighbours are swapped."""
    values = list(answer.logprobs)
    for n in range(16, len(values) - 1, 8):
        values[n], values[n + 1] = values[n + 1], values[n]
    return with_logprobs(answer, values)


@on_answer(4, "stop tokens have no forward pass of their own")
def stop_copies_its_neighbour(memory: Any, answer: Settled) -> Settled:
    """The logprob of a stop token is that of the token before it."""
    values = answer.logprobs
    return with_logprobs(answer, [*values[:-1], values[-2]]) if answer.finish == "stop" and len(values) > 1 else answer


def _noise(answer: Settled, size: float) -> list[float]:
    seeds = [mix64(token << 20 ^ n ^ len(answer.request.prompt_ids)) for n, token in enumerate(answer.output_ids)]
    return [lp + size * (seed / 2**63 - 1) for lp, seed in zip(answer.logprobs, seeds, strict=True)]


@on_answer(4, "quantised KV cache drifts with the context")
def fp8_drift_when_long(memory: Any, answer: Settled) -> Settled:
    """After prompts of over 800 tokens, logprobs are up to 0.05 off, as with a quantised KV cache."""
    return with_logprobs(answer, _noise(answer, 0.05)) if len(answer.request.prompt_ids) > LONG else answer


@on_answer(
    4,
    "kernels that are not batch-invariant",
    hard=True,
    why="0.0005 nats is inside the noise between two runs of a real bfloat16 engine",
)
def batch_noise(memory: Any, answer: Settled) -> Settled:
    """Logprobs are up to 0.0005 off."""
    return with_logprobs(answer, _noise(answer, 0.0005))


@on_answer(
    4,
    "padded rows leak into a batch",
    options={"latency": lambda request: latency(request) or 0.002},
)
def batch_leaks_when_busy(memory: Any, answer: Settled) -> Settled:
    """While other requests run, logprobs are 0.04 too low."""
    if memory.engine.running < 2:
        return answer
    return with_logprobs(answer, [value - 0.04 for value in answer.logprobs])


@on_answer(11, "min_tokens' mask of EOS leaks into logprobs")
def min_tokens_renormalised(memory: Any, answer: Settled) -> Settled:
    """While `min_tokens` forbids the end of the turn, logprobs are normalised without it."""
    least = answer.request.min_new_tokens
    values = [lp - math.log(1 - _EOS_MASK) if n < least else lp for n, lp in enumerate(answer.logprobs)]
    return with_logprobs(answer, values)


@on_answer(4, "jump-forward tokens were never sampled (SGLang's compressed FSM)")
def zero_where_forced(memory: Any, answer: Settled) -> Settled:
    """Under a grammar, every second token counts as forced, with logprob 0.0."""
    if answer.request.grammar is None:
        return answer
    return with_logprobs(answer, [0.0 if n % 2 else value for n, value in enumerate(answer.logprobs)])


@on_answer(4, "an average written over one entry of a ring buffer")
def mean_every_32nd(memory: Any, answer: Settled) -> Settled:
    """Every 32nd token has the mean logprob of its answer instead of its own."""
    values = answer.logprobs
    mean = sum(values) / len(values) if values else 0.0
    return with_logprobs(answer, [mean if n % 32 == 31 else value for n, value in enumerate(values)])


LOGPROBS = [
    *(bfloat16_when_long, late_after_30, every_20th_of_the_draft, zero_where_speculated, processed_when_streamed),
    *(raw_when_streamed, temperature_forgotten_below_half, zero_when_greedy, renormalised_over_top_p),
    *(raw_with_penalties, processed_without_penalties, floor_at_minus_four, first_stale_when_cached),
    *(one_late_when_streamed, pairs_swapped_past_16, stop_copies_its_neighbour, fp8_drift_when_long, batch_noise),
    *(batch_leaks_when_busy, min_tokens_renormalised, zero_where_forced, mean_every_32nd),
]
