"""Responses of vLLM 0.32's `/v1/completions`, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands_tito.testing.settle import Settled
from strands_tito.testing.text import completion_text, deltas
from strands_tito.testing.wire import EngineState, WireResponse, json_response, now, sse_response
from tito_vllm.scripted.rows import (
    Row,
    output_rows,
    prompt_logprobs,
    prompt_rows,
    routed_experts,
    stop_reason,
    usage_of,
    usage_so_far,
)

FINGERPRINT = "vllm-0.32.0-scripted"


@dataclass(frozen=True, slots=True)
class CompletionsAnswer:
    """Renders `/v1/completions`. As on the server, `echo` also sets `prompt_logprobs`."""

    state: EngineState
    body: Mapping[str, Any]
    server_id: str
    logprobs: int | None
    prompt_logprobs: int | None
    samples: int
    echo: bool

    def __call__(self, answers: Sequence[Settled], seconds: float) -> WireResponse:
        """Return one response for all prompts and samples."""
        if self.body.get("stream"):
            return sse_response(list(self._events(answers)))
        usage = usage_of(self.state, self.body, answers, self.samples, self.prompt_logprobs is not None)
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
        text = completion_text(self.state, answer, self.body)
        if prompt_only:
            text = self.state.decode(prompt)
        logprobs = None
        if self.logprobs is not None:
            table = [] if not self.echo else [*prompt_rows(answer, self.logprobs)]
            table += [] if prompt_only else output_rows(answer, self.logprobs)
            logprobs = self._table(table, 0)
        echoed = bool(self.body.get("return_token_ids"))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if prompt_only else answer.finish,
            "stop_reason": stop_reason(answer),
            "token_ids": list(ids) if echoed else None,
            "prompt_logprobs": scored,
            "prompt_token_ids": list(prompt) if echoed else None,
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

    def _events(self, answers: Sequence[Settled]) -> Iterator[dict[str, Any]]:
        """Yield one event per token; only the first event of a choice has the prompt ids."""
        options = self.body.get("stream_options") or {}
        usage = usage_of(self.state, self.body, answers, self.samples, False)
        for index, answer in enumerate(answers):
            offset = 0
            echoed = bool(self.body.get("return_token_ids"))
            texts = deltas(self.state, answer, self.body)
            rows = output_rows(answer, self.logprobs or 0)
            for n in range(max(1, len(answer.output_ids))):
                last = n >= len(answer.output_ids) - 1
                table = None if self.logprobs is None else self._table(rows[n : n + 1], offset)
                offset += sum(len(token) for token in table["tokens"]) if table else 0
                event = {
                    "index": index,
                    "text": texts[n] if n < len(texts) else "",
                    "logprobs": table,
                    "finish_reason": answer.finish if last else None,
                    "stop_reason": stop_reason(answer) if last else None,
                    "prompt_token_ids": list(answer.request.prompt_ids) if echoed and n == 0 else None,
                    "token_ids": list(answer.output_ids[n : n + 1]) if echoed else None,
                }
                final = last and index == len(answers) - 1 and not options.get("include_usage")
                so_far = usage_so_far(self.body, answer, min(n + 1, len(answer.output_ids)))
                yield {
                    **self._head(),
                    "choices": [event],
                    **({"usage": so_far} if so_far else {}),
                    **({"system_fingerprint": FINGERPRINT} if final else {}),
                }
        if options.get("include_usage"):
            yield {**self._head(), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}
