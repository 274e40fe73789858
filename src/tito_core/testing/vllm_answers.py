"""How vLLM 0.32 writes a finished generation down: `/v1/completions` and `/inference/v1/generate`, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tito_core.testing.settle import Settled, rank_of
from tito_core.testing.text import deltas, said_text
from tito_core.testing.wire import (
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
    """Renders `/v1/completions`. `prompt_logprobs` is set by echo too, as the server does."""

    state: EngineState
    body: Mapping[str, Any]
    server_id: str
    logprobs: int | None
    prompt_logprobs: int | None
    samples: int
    echo: bool

    def __call__(self, answers: Sequence[Settled], seconds: float) -> WireResponse:
        """One response for all prompts and samples."""
        if self.body.get("stream"):
            return sse_response(list(self._events(answers)))
        usage = _usage(self.state, self.body, answers, self.samples, self.prompt_logprobs is not None)
        return json_response(
            {
                **self._head(),
                "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _head(self) -> dict[str, Any]:
        return {"id": self.server_id, "object": "text_completion", "created": now(), "model": self.state.model}

    def _choice(self, index: int, answer: Settled) -> dict[str, Any]:
        ids, prompt = answer.output_ids, answer.request.prompt_ids
        prompt_only = self.echo and self.body.get("max_tokens") == 0
        scored = prompt_logprobs(self.state, answer, self.prompt_logprobs)
        text = said_text(self.state, answer, self.body)
        if prompt_only:
            text = self.state.decode(prompt)
        logprobs = None
        if self.logprobs is not None:
            table = [] if not self.echo else [*_prompt_rows(answer, self.logprobs)]
            table += [] if prompt_only else _rows(answer, self.logprobs)
            logprobs = self._table(table, 0)
        echoed = bool(self.body.get("return_token_ids"))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if prompt_only else answer.finish,
            "stop_reason": _stop_reason(answer),
            "token_ids": list(ids) if echoed else None,
            "prompt_logprobs": scored,
            "prompt_token_ids": list(prompt) if echoed else None,
            "routed_experts": answer.said.routed_experts,
        }

    def _table(self, rows: Sequence[Row], offset: int) -> dict[str, Any]:
        """Parallel lists over tokens; `text_offset` counts characters of the token texts before, from `offset`."""
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

    def _events(self, answers: Sequence[Settled]) -> Iterator[dict[str, Any]]:
        """One event a token; the prompt ids come with a choice's first event alone."""
        options = self.body.get("stream_options") or {}
        usage = _usage(self.state, self.body, answers, self.samples, False)
        for index, answer in enumerate(answers):
            offset = 0
            echoed = bool(self.body.get("return_token_ids"))
            texts = deltas(self.state, answer, self.body)
            rows = _rows(answer, self.logprobs or 0)
            for n in range(max(1, len(answer.output_ids))):
                last = n >= len(answer.output_ids) - 1
                table = None if self.logprobs is None else self._table(rows[n : n + 1], offset)
                offset += sum(len(token) for token in table["tokens"]) if table else 0
                event = {
                    "index": index,
                    "text": texts[n] if n < len(texts) else "",
                    "logprobs": table,
                    "finish_reason": answer.finish if last else None,
                    "stop_reason": _stop_reason(answer) if last else None,
                    "prompt_token_ids": list(answer.request.prompt_ids) if echoed and n == 0 else None,
                    "token_ids": list(answer.output_ids[n : n + 1]) if echoed else None,
                }
                final = last and index == len(answers) - 1 and not options.get("include_usage")
                yield {**self._head(), "choices": [event], **({"system_fingerprint": FINGERPRINT} if final else {})}
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
    samples: int

    def __call__(self, answers: Sequence[Settled], seconds: float) -> WireResponse:
        """One response for all samples."""
        if self.body.get("stream"):
            return sse_response(list(self._events(answers)))
        first = answers[0]
        echoed = bool(self.body.get("return_token_ids"))
        return json_response(
            {
                "request_id": self.server_id,
                "model": self.state.model,
                "created": now(),
                "usage": _usage(self.state, self.body, answers, self.samples, self.prompt_logprobs is not None),
                "prompt_logprobs": prompt_logprobs(self.state, first, self.prompt_logprobs),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": list(first.request.prompt_ids) if echoed else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": "tokens",
                "choices": [
                    self._choice(index, answer, 0, len(answer.output_ids), True) for index, answer in enumerate(answers)
                ],
            }
        )

    def _choice(self, index: int, answer: Settled, start: int, end: int, last: bool) -> dict[str, Any]:
        content = None
        if self.logprobs is not None:
            rows = _rows(answer, self.logprobs)[start:end]
            content = {"content": [_entry(row, answer.request.vocab_size) for row in rows]}
        return {
            "index": index,
            "finish_reason": answer.finish if last else None,
            "stop_reason": _stop_reason(answer) if last else None,
            "token_ids": list(answer.output_ids[start:end]),
            "routed_experts": answer.said.routed_experts if last and not self.body.get("stream") else None,
            "sampling_mask": None,
            "weight_versions": version_spans(self.state, answer) if last else None,
            "logprobs": content,
        }

    def _events(self, answers: Sequence[Settled]) -> Iterator[dict[str, Any]]:
        options = self.body.get("stream_options") or {}
        usage = _usage(self.state, self.body, answers, self.samples, False)
        for index, answer in enumerate(answers):
            for n in range(max(1, len(answer.output_ids))):
                last = n >= len(answer.output_ids) - 1
                echo = bool(self.body.get("return_token_ids")) and n == 0
                yield {
                    "request_id": self.server_id,
                    "usage": None,
                    **({"prompt_token_ids": list(answer.request.prompt_ids)} if echo else {}),
                    "output_mode": "tokens",
                    "choices": [self._choice(index, answer, n, n + 1, last)],
                }
        if options.get("include_usage"):
            yield {"request_id": self.server_id, "usage": usage, "output_mode": "tokens", "choices": []}


Row = tuple[int, float | None, Sequence[tuple[int, float]]]
"""Token id, its logprob (None for the first of a prompt), and the top alternatives, most likely first."""


def _rows(answer: Settled, k: int) -> list[Row]:
    request, said = answer.request, answer.said
    if not k:
        return [(token, logprob, ()) for token, logprob in zip(answer.output_ids, answer.logprobs, strict=True)]
    whole, start = (*request.prompt_ids, *answer.output_ids), len(request.prompt_ids)
    tops = said.top_logprobs or [
        answer.scorer.top(whole, position, k, request.reported_temperature) for position in range(start, len(whole))
    ]
    return [(t, lp, top[:k]) for t, lp, top in zip(answer.output_ids, answer.logprobs, tops, strict=False)]


def _prompt_rows(answer: Settled, k: int) -> list[Row]:
    """Teacher-forced scores of the prompt, always raw; the first token has none."""
    ids = answer.request.prompt_ids
    scores = answer.scorer.score(ids, 1, 1.0) if len(ids) > 1 else []
    tops = [answer.scorer.top(ids, n, k, 1.0) if k else () for n in range(1, len(ids))]
    return [(ids[0], None, ()), *zip(ids[1:], scores, tops, strict=True)]


def prompt_logprobs(state: EngineState, answer: Settled, k: int | None) -> list[Any] | None:
    """`[null, {"id": {logprob, rank, decoded_token}, ...}, ...]`: the prompt's own token first, then the top k."""
    if k is None:
        return None
    vocab = answer.request.vocab_size
    return [
        None if logprob is None else {
            str(i): {"logprob": value, "rank": rank, "decoded_token": state.piece(i)}
            for i, value, rank in _ranked(token, logprob, top, vocab)
        }
        for token, logprob, top in _prompt_rows(answer, k)
    ]


def _ranked(token: int, logprob: float, top: Sequence[tuple[int, float]], vocab: int) -> list[tuple[int, float, int]]:
    """The chosen token and then the top ones, each once, with its rank (of a token outside the top a bound)."""
    places = {i: rank for rank, (i, _) in enumerate(top, 1)}
    own = places.get(token, max(len(top) + 1 if top else 1, rank_of(logprob, vocab)))
    return [(token, logprob, own), *((i, value, places[i]) for i, value in top if i != token)]


def _entry(row: Row, vocab: int) -> dict[str, Any]:
    token, logprob, top = row
    assert logprob is not None  # output tokens always have one
    ranked = [
        {"token_id": i, "logprob": value, "rank": rank} for i, value, rank in _ranked(token, logprob, top, vocab)
    ]
    return {**ranked[0], "top_logprobs": ranked}


def _stop_reason(answer: Settled) -> int | str | None:
    """None for the main eos id, else what stopped the generation."""
    eos = answer.request.eos_ids
    return None if eos and answer.stop == eos[0] and not answer.request.ignore_eos else answer.stop


def _usage(
    state: EngineState, body: Mapping[str, Any], answers: Sequence[Settled], samples: int, scored: bool
) -> dict[str, Any]:
    """Each prompt counts once, however many samples it has; requests for prompt logprobs skip the prefix cache."""
    prompt = sum(len(answer.request.prompt_ids) for answer in answers[::samples])
    output = sum(len(answer.output_ids) for answer in answers)
    salt = body.get("cache_salt") or ""
    cached = [cached_tokens(state, answer, salt, 0 if scored else None) for answer in answers][0]
    usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    if body.get("stream"):
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}
    details = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {**usage, "prompt_tokens_details": details, "completion_tokens_details": None}
