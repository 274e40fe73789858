"""Answers of a scripted vLLM 0.32: `/v1/completions` and `/inference/v1/generate`, whole and streamed."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_conformance.testing.engine import completion_text, deltas
from tito_conformance.testing.pictures import PlacedImage
from tito_conformance.testing.script import Settled, given_scores, rank_of, reported_top, routed, support
from tito_conformance.testing.wire import (
    EngineState,
    WireResponse,
    cached_tokens,
    json_response,
    now,
    sse_response,
    version_spans,
)

FINGERPRINT = "vllm-0.32.0-scripted"


@dataclass(frozen=True, slots=True)
class CompletionsAnswer:
    """Renders `/v1/completions`."""

    state: EngineState
    body: Mapping[str, Any]
    server_id: str
    logprobs: int | None
    prompt_logprobs: int | None

    def __call__(self, answers: Sequence[Settled], seconds: float) -> WireResponse:
        """Return the response."""
        [answer] = answers
        if self.body.get("stream"):
            return sse_response(list(self._events(answer)))
        usage = usage_of(self.state, self.body, answer, self.prompt_logprobs is not None)
        return json_response(
            {
                **self._head(),
                "choices": [self._choice(answer)],
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.server_id,
            "object": "text_completion",
            "created": now(),
            "model": self.body.get("model") or self.state.model,
        }

    def _choice(self, answer: Settled) -> dict[str, Any]:
        echoed = bool(self.body.get("return_token_ids"))
        return {
            "index": 0,
            "text": completion_text(self.state, answer, self.body),
            "logprobs": None if self.logprobs is None else self._table(output_rows(answer, self.logprobs), 0),
            "finish_reason": answer.finish,
            "stop_reason": stop_reason(answer),
            "token_ids": list(answer.output_ids) if echoed else None,
            "prompt_logprobs": prompt_logprobs(self.state, answer, self.prompt_logprobs),
            "prompt_token_ids": list(answer.request.prompt_ids) if echoed else None,
            "routed_experts": routed_experts(self.state, answer, self.body),
        }

    def _table(self, rows: Sequence[Row], offset: int) -> dict[str, Any]:
        """Return parallel lists over tokens; `text_offset` counts characters of earlier token texts, from `offset`."""
        offsets, values, tokens, tops = [], [], [], []
        for token, logprob, top in rows:
            offsets.append(offset)
            values.append(logprob)
            tokens.append(text := self._token(token))
            offset += len(text)
            tops.append(None if logprob is None else {self._token(i): value for i, value in [(token, logprob), *top]})
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.body.get("return_tokens_as_token_ids") else self.state.piece(token_id)

    def _events(self, answer: Settled) -> Iterator[dict[str, Any]]:
        """Yield one event per token; only the first one has the prompt ids."""
        options = self.body.get("stream_options") or {}
        usage = usage_of(self.state, self.body, answer, False)
        offset, echoed = 0, bool(self.body.get("return_token_ids"))
        texts = deltas(self.state, answer, self.body)
        rows = output_rows(answer, self.logprobs or 0)
        for n in range(max(1, len(answer.output_ids))):
            last = n >= len(answer.output_ids) - 1
            table = None if self.logprobs is None else self._table(rows[n : n + 1], offset)
            offset += sum(len(token) for token in table["tokens"]) if table else 0
            event = {
                "index": 0,
                "text": texts[n] if n < len(texts) else "",
                "logprobs": table,
                "finish_reason": answer.finish if last else None,
                "stop_reason": stop_reason(answer) if last else None,
                "prompt_token_ids": list(answer.request.prompt_ids) if echoed and n == 0 else None,
                "token_ids": list(answer.output_ids[n : n + 1]) if echoed else None,
            }
            so_far = usage_so_far(self.body, answer, min(n + 1, len(answer.output_ids)))
            yield {
                **self._head(),
                "choices": [event],
                **({"usage": so_far} if so_far else {}),
                **({"system_fingerprint": FINGERPRINT} if last and not options.get("include_usage") else {}),
            }
        if options.get("include_usage"):
            yield {**self._head(), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """Renders `/inference/v1/generate` in its `tokens` mode."""

    state: EngineState
    body: Mapping[str, Any]
    server_id: str
    logprobs: int | None
    prompt_logprobs: int | None

    def __call__(self, answers: Sequence[Settled], seconds: float) -> WireResponse:
        """Return the response."""
        [answer] = answers
        if self.body.get("stream"):
            return sse_response(list(self._events(answer)))
        echoed = bool(self.body.get("return_token_ids"))
        return json_response(
            {
                "request_id": self.server_id,
                "model": self.body.get("model") or self.state.model,
                "created": now(),
                "usage": usage_of(self.state, self.body, answer, self.prompt_logprobs is not None),
                "prompt_logprobs": prompt_logprobs(self.state, answer, self.prompt_logprobs),
                "prompt_token_id_logprobs": self._of_ids(answer),
                "prompt_token_ids": list(answer.request.prompt_ids) if echoed else None,
                "mm_placeholders": placeholders(answer.request.images) if echoed else None,
                "metrics": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": "tokens",
                "choices": [self._choice(answer, 0, len(answer.output_ids), True)],
            }
        )

    def _choice(self, answer: Settled, start: int, end: int, last: bool) -> dict[str, Any]:
        content = None
        if self.logprobs is not None:
            rows = output_rows(answer, self.logprobs)[start:end]
            content = {"content": [entry(row, answer.request.vocab_size, self.logprobs) for row in rows]}
        return {
            "index": 0,
            "finish_reason": answer.finish if last else None,
            "stop_reason": stop_reason(answer) if last else None,
            "token_ids": list(answer.output_ids[start:end]),
            "routed_experts": routed_experts(self.state, answer, self.body["sampling_params"]) if last else None,
            "sampling_mask": sampling_mask(self.state, answer) if last and not self.body.get("stream") else None,
            "weight_versions": version_spans(self.state, answer) if last else None,
            "logprobs": content,
        }

    def _of_ids(self, answer: Settled) -> str | None:
        rows = self.body["sampling_params"].get("prompt_logprob_token_ids")
        return None if rows is None else npy(np.array(given_scores(answer, rows), np.float32))

    def _events(self, answer: Settled) -> Iterator[dict[str, Any]]:
        options = self.body.get("stream_options") or {}
        usage = usage_of(self.state, self.body, answer, False)
        placed = placeholders(answer.request.images)
        for n in range(max(1, len(answer.output_ids))):
            last = n >= len(answer.output_ids) - 1
            echo = bool(self.body.get("return_token_ids")) and n == 0
            so_far = usage_so_far(self.body, answer, min(n + 1, len(answer.output_ids)))
            yield {
                "request_id": self.server_id,
                "usage": so_far and {**so_far, "prompt_tokens_details": None, "completion_tokens_details": None},
                **({"prompt_token_ids": list(answer.request.prompt_ids)} if echo else {}),
                **({"mm_placeholders": placed} if echo and placed else {}),
                "output_mode": "tokens",
                "choices": [self._choice(answer, n, n + 1, last)],
            }
        if options.get("include_usage"):
            yield {"request_id": self.server_id, "usage": usage, "output_mode": "tokens", "choices": []}


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


def placeholders(images: Sequence[PlacedImage]) -> dict[str, list[dict[str, int]]] | None:
    """Return `mm_placeholders` of a response."""
    return {"image": [{"offset": each.offset, "length": each.length} for each in images]} if images else None


def routed_experts(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> str | None:
    """Base64 of a whole `.npy` of every token but the last, without the first `routed_experts_prompt_start`."""
    if state.experts is None or answer.completion.routed_experts is not None:
        return answer.completion.routed_experts
    start = params.get("routed_experts_prompt_start") or 0
    return npy(routed((*answer.request.prompt_ids, *answer.output_ids), *state.experts)[start:])


def npy(values: np.ndarray) -> str:
    """Return base64 of a whole `.npy`."""
    stream = io.BytesIO()
    np.save(stream, values)
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


def usage_of(state: EngineState, body: Mapping[str, Any], answer: Settled, scored: bool) -> dict[str, Any]:
    """Return the usage. Prompt logprobs bypass the prefix cache."""
    prompt, output = len(answer.request.prompt_ids), len(answer.output_ids)
    cached = cached_tokens(state, answer, body.get("cache_salt") or "", 0 if scored else None)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    if body.get("stream"):
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}
    details = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {**usage, "prompt_tokens_details": details, "completion_tokens_details": None}
