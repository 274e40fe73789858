"""Responses of vLLM 0.32's `/inference/v1/generate`, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands_tito.testing.settle import Settled
from strands_tito.testing.wire import EngineState, WireResponse, json_response, now, sse_response, version_spans
from tito_vllm.scripted.images import placeholders
from tito_vllm.scripted.rows import (
    entry,
    output_rows,
    prompt_logprobs,
    routed_experts,
    sampling_mask,
    stop_reason,
    usage_of,
    usage_so_far,
)


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
        """Return one response for all samples."""
        if self.body.get("stream"):
            return sse_response(list(self._events(answers)))
        first = answers[0]
        echoed = bool(self.body.get("return_token_ids"))
        return json_response(
            {
                "request_id": self.server_id,
                "model": self.state.model,
                "created": now(),
                "usage": usage_of(self.state, self.body, answers, self.samples, self.prompt_logprobs is not None),
                "prompt_logprobs": prompt_logprobs(self.state, first, self.prompt_logprobs),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": list(first.request.prompt_ids) if echoed else None,
                "mm_placeholders": placeholders(first.request.images) if echoed else None,
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
            rows = output_rows(answer, self.logprobs)[start:end]
            content = {"content": [entry(row, answer.request.vocab_size, self.logprobs) for row in rows]}
        return {
            "index": index,
            "finish_reason": answer.finish if last else None,
            "stop_reason": stop_reason(answer) if last else None,
            "token_ids": list(answer.output_ids[start:end]),
            "routed_experts": self._experts(answer) if last else None,
            "sampling_mask": sampling_mask(self.state, answer) if last and not self.body.get("stream") else None,
            "weight_versions": version_spans(self.state, answer) if last else None,
            "logprobs": content,
        }

    def _experts(self, answer: Settled) -> str | None:
        return routed_experts(self.state, answer, self.body["sampling_params"])

    def _events(self, answers: Sequence[Settled]) -> Iterator[dict[str, Any]]:
        options = self.body.get("stream_options") or {}
        usage = usage_of(self.state, self.body, answers, self.samples, False)
        for index, answer in enumerate(answers):
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
                    "choices": [self._choice(index, answer, n, n + 1, last)],
                }
        if options.get("include_usage"):
            yield {"request_id": self.server_id, "usage": usage, "output_mode": "tokens", "choices": []}
