"""The stranger's defects in sampling parameters: ignored, misread, mixed up between requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.defects.stranger_hooks import (
    as_kind,
    on_policy,
    on_request,
    on_sampler,
    params_of,
    streamed,
    with_params,
)
from tito_conformance.testing import Completion, ScriptedRequest
from tito_conformance.testing.script import mix64


@on_request(11, "silently dropped field: pegainfer #490, vllm-mlx #258")
def logit_bias_dropped(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """`logit_bias` is ignored, in sampling and in reported logprobs."""
    return with_params(request, logit_bias=None) if params_of(request).get("logit_bias") else request


@on_request(11, "ids of a padded or extended vocabulary shifted by one")
def logit_bias_next_id(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """`logit_bias` applies to the id after the requested one."""
    bias = params_of(request).get("logit_bias")
    if not bias:
        return request
    return with_params(request, logit_bias={str((int(i) + 1) % request.vocab_size): v for i, v in bias.items()})


@on_request(11, "class of vLLM V1 sampler penalty rewrites")
def frequency_counts_once(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A frequency penalty is subtracted once a token, however often the token occurred."""
    params = params_of(request)
    frequency = params.get("frequency_penalty") or 0.0
    if not frequency:
        return request
    presence = (params.get("presence_penalty") or 0.0) + frequency
    return with_params(request, frequency_penalty=0.0, presence_penalty=presence)


@dataclass(frozen=True, slots=True)
class _OverPrompt(ScriptedRequest):
    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        return ScriptedRequest.offsets(self, (*self.prompt_ids, *output))


@on_request(11, "presence and frequency penalties counted over the prompt")
def penalties_over_prompt(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Presence and frequency penalties count the prompt's tokens too."""
    return as_kind(_OverPrompt, request)


@dataclass(frozen=True, slots=True)
class _Forgetful(ScriptedRequest):
    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        return ScriptedRequest.offsets(self, output[len(output) // 24 * 24 :])


@on_request(11, "output history lost on preemption; class of vLLM #28787 (all_token_ids truncated)")
def penalties_forget_after_24(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Every 24 tokens, as after a preemption, penalties forget what was sampled before."""
    return as_kind(_Forgetful, request)


@dataclass(frozen=True, slots=True)
class _Late(ScriptedRequest):
    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        return ScriptedRequest.offsets(self, output[:-1])


@on_request(11, "one-token-stale history in logits processors: vllm-mlx #404")
def penalties_lag_one_token(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Penalties do not count the newest token yet, as with overlapped scheduling."""
    return as_kind(_Late, request)


@on_request(11, "seeded path without min_p: SGLang #33695 is its refused form")
def min_p_lost_with_seed(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """`min_p` is ignored in requests with a seed."""
    return request if request.seed is None else replace(request, min_p=0.0)


@on_request(11, "fused top-k top-p kernels that take one of the two")
def top_k_lost_with_top_p(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """`top_k` is ignored in requests with `top_p` below 1."""
    return replace(request, top_k=0) if request.top_p < 1 else request


@on_request(11, "generation_config.json over the request: NeMo-RL #3497, vLLM PR #12622")
def generation_config_temperature(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A temperature of exactly 1.0 counts as unset, and the model's own 0.7 is used."""
    if request.temperature != 1.0:
        return request
    processed = request.wire == "sglang"
    return replace(request, temperature=0.7, reported_temperature=0.7 if processed else request.reported_temperature)


@on_request(11, "generation_config.json over the request: NeMo-RL #3497")
def generation_config_top_p(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A `top_p` of exactly 1.0 counts as unset, and the model's own 0.9 is used; logprobs stay raw."""
    return replace(request, top_p=0.9) if request.top_p == 1.0 and request.temperature > 0 else request


@on_request(11, "a gateway that clamps parameters to a provider's range")
def temperature_capped(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Temperatures above 1 are sampled at 1."""
    return replace(request, temperature=min(request.temperature, 1.0))


@on_request(11, "_SAMPLING_EPS thresholds applied to the wrong value")
def cold_is_greedy(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Temperatures below 0.6 are sampled greedily."""
    return replace(request, temperature=0.0) if 0 < request.temperature < 0.6 else request


@on_request(11, "a falsy zero: `temperature or default`")
def zero_temperature_is_unset(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """In streams a temperature of 0 counts as unset, and 1 is used."""
    return replace(request, temperature=1.0) if request.temperature == 0 and streamed(request) else request


@on_request(11, "ties and >= against > in top-k masks")
def top_k_keeps_one_more(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """`top_k` keeps one token more than asked."""
    return replace(request, top_k=request.top_k + 1) if request.top_k > 0 else request


@on_request(11, "a falsy or narrowed seed")
def seed_ignored(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """The seed is ignored: two seeds give the same tokens."""
    return replace(request, seed=None)


@on_request(11, "a narrowed seed")
def seed_of_three_bits(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Only the low three bits of a seed are used, so that samples of a group repeat."""
    return request if request.seed is None else replace(request, seed=request.seed % 8)


@on_request(11, "generators owned by batch slots")
def seed_depends_on_order(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """The same seed gives other tokens in each request: the generator belongs to the slot."""
    memory.count = getattr(memory, "count", 0) + 1
    return request if request.seed is None else replace(request, seed=request.seed ^ memory.count)


@on_request(11, "all requests of a batch get one's parameters: lmms-eval #1326; stale persistent-batch slots")
def stale_parameters_every_8th(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Every eighth request is sampled with the temperature, top_p, top_k and min_p of the one before."""
    memory.count, before = getattr(memory, "count", 0) + 1, getattr(memory, "before", request)
    memory.before = request
    if memory.count % 8:
        return request
    names = ("temperature", "top_p", "top_k", "min_p")
    return replace(request, **{name: getattr(before, name) for name in names})


@on_request(11, "stale penalties or bias in a reused slot")
def stale_penalties(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """A request without penalties and bias gets those of the last request that had some, once."""
    names = ("presence_penalty", "frequency_penalty", "logit_bias")
    own = {name: value for name, value in params_of(request).items() if name in names and value}
    stale, memory.stale = getattr(memory, "stale", {}), own
    return with_params(request, **stale) if stale and not own else request


def _likeliest(draw: Any, context: int, eos: Any, offsets: Any) -> list[tuple[int, float]]:
    """Return the likely ids of a context with their logits, likeliest first."""
    pairs = [(token, logit + offsets.get(token, 0.0)) for token, logit in draw.__self__._candidates(context, eos)]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


@on_policy(11, "gateway caches keyed by the prompt")
def cache_ignores_seed(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """A gateway answers a repeated prompt from its cache, whatever the seed."""
    known = memory.__dict__.setdefault("known", {})
    key = (request.prompt_ids, request.max_new_tokens, request.temperature, request.grammar is None)
    if key not in known:
        known[key] = policy(request)
    return known[key]


@on_sampler(11, "the first token drawn by a fallback sampler: vllm-mlx #404")
def first_token_untruncated(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """The first token of an answer is drawn without top_k, top_p and min_p."""
    if step == 0:
        request = replace(request, top_k=0, top_p=1.0, min_p=0.0)
    return int(draw(context, request, noise, eos, offsets))


@on_sampler(11, "top_p on the distribution before the temperature")
def top_p_before_temperature(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """`top_p` and `min_p` choose from the distribution at temperature 1, which is tempered afterwards."""
    cuts = request.top_p < 1 or request.min_p > 0
    if not cuts or request.temperature in (0.0, 1.0):
        return int(draw(context, request, noise, eos, offsets))
    pairs, kept, mass = _likeliest(draw, context, eos, offsets), list[tuple[int, float]](), 0.0
    weights = [math.exp(logit) for _, logit in pairs]
    total = sum(weights) + 2.0  # the tail
    for pair, weight in zip(pairs, weights, strict=True):
        if mass >= request.top_p * total or weight < request.min_p * weights[0]:
            break
        kept.append(pair)
        mass += weight
    tempered = [math.exp(logit / request.temperature) for _, logit in kept]
    point = noise / 2**64 * sum(tempered)
    for (token, _), weight in zip(kept, tempered, strict=True):
        point -= weight
        if point < 0:
            return token
    return kept[-1][0]


@on_sampler(11, "top-p rejection kernels whose rounds run out; tail lost")
def tail_never_sampled(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """Unlikely tokens are never sampled: the distribution is cut at its nine likeliest."""
    if request.temperature > 0 and request.top_k <= 0:
        request = replace(request, top_k=8 + len(eos))
    return int(draw(context, request, noise, eos, offsets))


@on_sampler(11, "draft tokens accepted without rejection")
def every_20th_greedy(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """Every 20th token is the draft model's likeliest, accepted unchecked; its logprob is right."""
    if step % 20 == 19:
        request = replace(request, temperature=0.0)
    return int(draw(context, request, noise, eos, offsets))


@on_sampler(11, "EOS suppressed at draft positions: vLLM PR #41493")
def eos_half_suppressed(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """The end of the turn is not sampled at odd positions, while logprobs are those of the full distribution."""
    return int(draw(context, request, noise, () if step % 2 and request.temperature > 0 else eos, offsets))


@on_sampler(11, "Philox offsets that repeat")
def noise_repeats_every_16(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """The random numbers of an answer repeat every 16 tokens."""
    seed = mix64(hash((request.number if request.seed is None else request.seed, request.prompt_ids[-4:])) % 2**63)
    return int(draw(context, request, mix64(seed ^ step % 16), eos, offsets))


@on_sampler(
    11,
    "argmax ties broken by batch layout: vLLM #7627",
    hard=True,
    why="two tokens with equal logits are equally greedy; no client can call either wrong",
)
def greedy_tie_broken_otherwise(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """At temperature 0 a tie of the two likeliest tokens goes to the higher id."""
    if request.temperature > 0:
        return int(draw(context, request, noise, eos, offsets))
    pairs = _likeliest(draw, context, eos, offsets)
    return max(token for token, logit in pairs if logit == pairs[0][1])


@on_sampler(11, "quantised logits: close tokens become ties")
def greedy_takes_the_second(
    draw: Any, step: int, context: int, request: ScriptedRequest, noise: int, eos: Any, offsets: Any
) -> int:
    """At temperature 0 every 12th token is the second likeliest if that is nearly as likely."""
    if request.temperature > 0 or step % 12 != 11:
        return int(draw(context, request, noise, eos, offsets))
    first, second, *_ = _likeliest(draw, context, eos, offsets)
    return second[0] if first[1] - second[1] < 0.5 else first[0]


SAMPLING = [
    *(logit_bias_dropped, logit_bias_next_id, frequency_counts_once, penalties_over_prompt, penalties_forget_after_24),
    *(penalties_lag_one_token, min_p_lost_with_seed, top_k_lost_with_top_p, generation_config_temperature),
    *(generation_config_top_p, temperature_capped, cold_is_greedy, zero_temperature_is_unset, top_k_keeps_one_more),
    *(seed_ignored, seed_of_three_bits, seed_depends_on_order, stale_parameters_every_8th, stale_penalties),
    *(cache_ignores_seed, first_token_untruncated, top_p_before_temperature, tail_never_sampled, every_20th_greedy),
    *(eos_half_suppressed, noise_repeats_every_16, greedy_tie_broken_otherwise, greedy_takes_the_second),
]
