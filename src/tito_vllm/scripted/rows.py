"""Parts of responses that vLLM's two token endpoints share: logprobs, stop reason, usage."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strands_tito.testing.optional_outputs import reported_top, routed, support
from strands_tito.testing.settle import Settled, rank_of
from strands_tito.testing.wire import EngineState, cached_tokens

Row = tuple[int, float | None, Sequence[tuple[int, float]]]
"""Token id, its logprob (None for the first of a prompt), and the top tokens, most likely first."""


def output_rows(answer: Settled, k: int) -> list[Row]:
    """The completion's tokens, each with the top `k`."""
    request, completion = answer.request, answer.completion
    if not k:
        return [(token, logprob, ()) for token, logprob in zip(answer.output_ids, answer.logprobs, strict=True)]
    whole, start = request.whole(answer.output_ids), len(request.prompt_ids)
    tops = completion.top_logprobs or [
        reported_top(answer.scorer, request, whole, position, k) for position in range(start, len(whole))
    ]
    return [(t, lp, top[:k]) for t, lp, top in zip(answer.output_ids, answer.logprobs, tops, strict=False)]


def prompt_rows(answer: Settled, k: int) -> list[Row]:
    """Return the raw teacher-forced scores of the prompt; the first token has none."""
    ids, context = answer.request.prompt_ids, answer.request.context
    scores = answer.scorer.score(context, 1, 1.0) if len(ids) > 1 else []
    tops = [answer.scorer.top(context, n, k, 1.0) if k else () for n in range(1, len(ids))]
    return [(ids[0], None, ()), *zip(ids[1:], scores, tops, strict=True)]


def prompt_logprobs(state: EngineState, answer: Settled, k: int | None) -> list[Any] | None:
    """Return `[null, {"id": {logprob, rank, decoded_token}, ...}, ...]`: the prompt's token first, then the top k."""
    if k is None:
        return None
    vocab = answer.request.vocab_size
    return [
        None
        if logprob is None
        else {
            str(i): {"logprob": value, "rank": rank, "decoded_token": state.piece(i)}
            for i, value, rank in _ranked(token, logprob, top, vocab)
        }
        for token, logprob, top in prompt_rows(answer, k)
    ]


def _ranked(token: int, logprob: float, top: Sequence[tuple[int, float]], vocab: int) -> list[tuple[int, float, int]]:
    """Return the sampled token and then the top tokens, each once, with its rank (a bound outside the top)."""
    places = {i: rank for rank, (i, _) in enumerate(top, 1)}
    own = places.get(token, max(len(top) + 1 if top else 1, rank_of(logprob, vocab)))
    return [(token, logprob, own), *((i, value, places[i]) for i, value in top if i != token)]


def entry(row: Row, vocab: int, k: int) -> dict[str, Any]:
    """Return one entry of `/inference/v1/generate`'s `logprobs.content`; its `k` tokens start with the sampled one."""
    token, logprob, top = row
    assert logprob is not None  # output tokens always have one
    ranked = [{"token_id": i, "logprob": value, "rank": rank} for i, value, rank in _ranked(token, logprob, top, vocab)]
    return {**ranked[0], "top_logprobs": ranked[: max(1, k)]}


def routed_experts(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> str | None:
    """Base64 of a whole `.npy` of every token but the last, without the first `routed_experts_prompt_start`."""
    if state.experts is None or answer.completion.routed_experts is not None:
        return answer.completion.routed_experts
    start = params.get("routed_experts_prompt_start") or 0
    stream = io.BytesIO()
    np.save(stream, routed((*answer.request.prompt_ids, *answer.output_ids), *state.experts)[start:])
    return base64.b64encode(stream.getvalue()).decode()


def sampling_mask(state: EngineState, answer: Settled) -> list[list[int]] | None:
    """Return for each output token the ids it was sampled from, on a server with `--return-sampling-mask`."""
    if not state.sampling_masks:
        return None
    request = answer.request
    whole, start = request.whole(answer.output_ids), len(request.prompt_ids)
    return [sorted(token for token, _ in support(answer.scorer, request, whole, n)) for n in range(start, len(whole))]


def stop_reason(answer: Settled) -> int | str | None:
    """Return None for the main eos id, else the stop token or string."""
    eos = answer.request.eos_ids
    return None if eos and answer.stop == eos[0] and not answer.request.ignore_eos else answer.stop


def usage_so_far(body: Mapping[str, Any], answer: Settled, tokens: int) -> dict[str, Any] | None:
    """Return the usage in an event after `tokens` tokens of an answer, with `continuous_usage_stats`; else None."""
    options, prompt = body.get("stream_options") or {}, len(answer.request.prompt_ids)
    if not (options.get("include_usage") and options.get("continuous_usage_stats")):
        return None
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


def usage_of(
    state: EngineState, body: Mapping[str, Any], answers: Sequence[Settled], samples: int, scored: bool
) -> dict[str, Any]:
    """Return the usage. A prompt counts once for all samples; prompt logprobs bypass the prefix cache."""
    prompt = sum(len(answer.request.prompt_ids) for answer in answers[::samples])
    output = sum(len(answer.output_ids) for answer in answers)
    salt = body.get("cache_salt") or ""
    cached = max(cached_tokens(state, answer, salt, 0 if scored else None) for answer in answers[::samples])
    usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    if body.get("stream"):
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}
    details = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {**usage, "prompt_tokens_details": details, "completion_tokens_details": None}
