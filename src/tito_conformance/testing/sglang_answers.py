"""Answers of a scripted SGLang 0.5.23's `/generate`, whole and streamed."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tito_conformance.testing.engine import completion_text, prefixes
from tito_conformance.testing.script import (
    ScriptedRequest,
    Settled,
    given_scores,
    reported_top,
    routed,
    support,
)
from tito_conformance.testing.wire import (
    EngineState,
    WireResponse,
    cached_tokens,
    json_response,
    sse_response,
    version_spans,
)


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """Renders `/generate`. With `many` (a batch, or n above 1) the response is a list."""

    state: EngineState
    body: Mapping[str, Any]
    many: bool

    def __call__(self, answers: Sequence[Settled], seconds: float) -> WireResponse:
        """Return one object per prompt and sample."""
        if self.body.get("stream"):
            return sse_response([event for answer in answers for event in self._events(answer, seconds)])
        written = [self._whole(answer, seconds) for answer in answers]
        return json_response(written if self.many else written[0])

    def _whole(self, answer: Settled, seconds: float) -> dict[str, Any]:
        params = answer.request.body.get("sampling_params") or {}
        text = completion_text(self.state, answer, params if isinstance(params, dict) else {})
        meta = (
            self._waiting(answer, seconds)
            if answer.queued
            else self._meta(answer, self._cached(answer), seconds, self._logprobs(answer))
        )
        meta["response_sent_to_client_ts"] = time.time()
        written = {"text": text, "output_ids": list(answer.output_ids), "meta_info": meta}
        if self.state.skip_tokenizer_init:
            del written["text"]
        if self.body.get("return_prompt_token_ids"):
            written["prompt_token_ids"] = list(answer.request.prompt_ids)
        return written

    def _events(self, answer: Settled, seconds: float) -> Iterator[dict[str, Any]]:
        """Yield cumulative events for the first token, every `stream_interval`-th and the last."""
        if answer.queued:
            yield self._whole(answer, seconds)
            return
        params = answer.request.body.get("sampling_params") or {}
        interval = params.get("stream_interval") or 1
        logprobs = self._logprobs(answer)  # once, not again in each cumulative event
        texts, total, cached = prefixes(self.state, answer, params), len(answer.output_ids), self._cached(answer)
        for n in range(1, max(1, total) + 1):
            if n not in (1, total) and (n - 1) % interval:
                continue
            part = replace(answer, output_ids=answer.output_ids[:n], logprobs=answer.logprobs[:n])
            meta = self._meta(part, cached, seconds, _first(logprobs, n))
            if n < total:
                meta["finish_reason"] = None
                del meta["weight_versions"], meta["e2e_latency"]
            if n == 1:
                meta["response_sent_to_client_ts"] = time.time()
            event = {"text": texts[n - 1] if texts else "", "output_ids": list(part.output_ids), "meta_info": meta}
            if self.state.skip_tokenizer_init:
                del event["text"]
            if self.body.get("return_prompt_token_ids"):
                event["prompt_token_ids"] = list(answer.request.prompt_ids)
            yield event

    def _cached(self, answer: Settled) -> int:
        """Return the cached tokens: with prompt logprobs from offset k, the cache is used only up to k."""
        start = self.body.get("logprob_start_len")
        scores_prompt = self.body.get("return_logprob") and start is not None and start >= 0
        salt = f"{self.body.get('extra_key') or ''}{self.body.get('cache_salt') or ''}"
        return cached_tokens(self.state, answer, salt, start if scores_prompt else None)

    def _meta(self, answer: Settled, cached: int, seconds: float, logprobs: Mapping[str, Any]) -> dict[str, Any]:
        request = answer.request
        meta: dict[str, Any] = {
            "id": request.server_id,
            "finish_reason": _finish_reason(answer),
            "prompt_tokens": len(request.prompt_ids),
            "weight_version": self.state.weight_version,
            "num_retractions": 0,
        }
        meta |= logprobs
        if self.body.get("return_sampling_mask"):
            meta |= self._mask(answer)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": len(answer.output_ids),
            "cached_tokens": cached,
            "weight_versions": version_spans(self.state, answer),
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        }
        if request.images:
            meta["image_tokens"] = sum(image.length for image in request.images)
        if self.body.get("return_routed_experts") and (experts := self._experts(answer)) is not None:
            meta["routed_experts"] = experts
        return {**meta, "dp_rank": None, "e2e_latency": seconds}

    def _experts(self, answer: Settled) -> str | None:
        if self.state.experts is None or answer.completion.routed_experts is not None:
            return answer.completion.routed_experts
        start = self.body.get("routed_experts_start_len") or 0
        experts = routed((*answer.request.prompt_ids, *answer.output_ids), *self.state.experts)[start:]
        return base64.b64encode(experts.astype("<i4").tobytes()).decode()  # int32, without a shape

    def _mask(self, answer: Settled) -> dict[str, Any]:
        """Return per output token the ids it was sampled from, and logprobs over these, of the sampled id or of all."""
        request, n = answer.request, len(answer.output_ids)
        whole, start = request.whole(answer.output_ids), len(request.prompt_ids)
        kept = answer.completion.support or [
            support(answer.scorer, request, whole, p) for p in range(start, len(whole))
        ]
        of_all = self.body.get("sampling_logprobs_mode") == "support"
        logprobs = [
            [logprob for _, logprob in row] if of_all else dict(row)[token]
            for row, token in zip(kept, answer.output_ids, strict=False)
        ]
        return {
            "output_token_sampling_mask": [[token for token, _ in row] for row in kept[:n]],
            "output_token_sampling_logprobs": logprobs,
            "output_token_sampling_mask_length": n,
        }

    def _waiting(self, answer: Settled, seconds: float) -> dict[str, Any]:
        """Return the meta information of a request aborted in the queue: no prompt_tokens, no cached_tokens."""
        logprobs = self._logprobs(answer)
        return {
            "id": answer.request.server_id,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": self.state.weight_version,
            "e2e_latency": seconds,
            "weight_versions": version_spans(self.state, answer),
            **({name: value for name, value in logprobs.items() if "top" not in name}),
            "completion_tokens": 0,
        }

    def _logprobs(self, answer: Settled) -> dict[str, Any]:
        """Return `[logprob, id, null]` entries of the prompt from `logprob_start_len` on (raw), and of the output."""
        if not self.body.get("return_logprob"):
            return {}
        ids, context, start = _masked(answer.request), answer.request.context, self.body.get("logprob_start_len")
        start = len(ids) if start is None or start < 0 else start
        k = self.body.get("top_logprobs_num") or 0
        text = self.state.piece if self.body.get("return_text_in_logprobs") else lambda token: None
        prompt: list[Any] = []
        if start < len(ids):
            scores = answer.scorer.score(context, start + 1, 1.0) if start + 1 < len(ids) else []
            prompt = [[None, ids[start], text(ids[start])]]
            prompt += [[lp, token, text(token)] for lp, token in zip(scores, ids[start + 1 :], strict=True)]
        output = [[lp, token, text(token)] for lp, token in zip(answer.logprobs, answer.output_ids, strict=True)]
        entries: dict[str, Any] = {
            "input_token_logprobs": prompt,
            "output_token_logprobs": output,
            "output_token_logprobs_length": len(output),
        }
        if (given := self.body.get("token_ids_logprob")) and prompt:
            table = given_scores(answer, [given] * (len(ids) - start), start + 1)
            *inside, after = [_entries(list(zip(given, row, strict=True))) for row in table]
            entries |= {"input_token_ids_logprobs": [None, *inside], "output_token_ids_logprobs": [after]}
        if k:
            tops = self._tops(answer)
            before = [answer.scorer.top(context, n, k, 1.0) for n in range(start + 1, len(ids))]
            entries["input_top_logprobs"] = [None, *(_entries(top[:k]) for top in before)] if prompt else []
            entries["output_top_logprobs"] = [_entries(top[:k]) for top in tops[: len(output)]]
        return entries

    def _tops(self, answer: Settled) -> Sequence[Sequence[tuple[int, float]]]:
        """Return the likeliest ids of each output token, if requested."""
        k = self.body.get("top_logprobs_num") or 0
        if answer.completion.top_logprobs or not k:
            return answer.completion.top_logprobs or ()
        whole, start = answer.request.whole(answer.output_ids), len(answer.request.prompt_ids)
        return [reported_top(answer.scorer, answer.request, whole, n, k) for n in range(start, len(whole))]


def _masked(request: ScriptedRequest) -> tuple[int, ...]:
    """Return the prompt's ids as the server's logprobs name them: 0 inside an image and for the last id."""
    ids = [token if token < request.vocab_size - 1 else 0 for token in request.prompt_ids]
    for image in request.images:
        ids[image.offset : image.offset + image.length] = [0] * image.length
    return tuple(ids)


def _first(logprobs: Mapping[str, Any], n: int) -> dict[str, Any]:
    """Return the logprobs of an answer as an event with its first `n` tokens has them."""
    cut = {name: logprobs[name][:n] for name in ("output_token_logprobs", "output_top_logprobs") if name in logprobs}
    count = {"output_token_logprobs_length": len(cut["output_token_logprobs"])} if cut else {}
    return {**logprobs, **cut, **count}


def _entries(top: Sequence[tuple[int, float]]) -> list[list[Any]]:
    return [[logprob, token, None] for token, logprob in top]


def _finish_reason(answer: Settled) -> dict[str, Any]:
    if answer.finish == "stop":
        return {"type": "stop", "matched": answer.stop}
    if answer.finish == "length":
        return {"type": "length", "length": len(answer.output_ids)}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
