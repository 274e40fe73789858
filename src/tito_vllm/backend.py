"""vLLM as a backend: token ids in and out over `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tito_core.backend.errors import ProtocolViolationError
from tito_core.backend.http_backend import Answer, HttpBackend
from tito_core.backend.protocol import EngineInfo, TokenRequest, TokenResponse
from tito_core.backend.transport import HttpRequest
from tito_core.backend.validate import Checks
from tito_core.ledger.turn import Finish, Logprobs
from tito_vllm import wire


class VLLMBackend(HttpBackend):
    """Speaks to one vLLM server. Arguments: see `HttpBackend`."""

    name = "vllm"

    async def _discover(self) -> EngineInfo:
        models = await self.get("/v1/models", wire.Models)
        model = self.choose_model(models.data)
        version = await self.get("/version", wire.Version)
        return EngineInfo(self.name, model.id, model.max_model_len, version.version)

    async def _generate(self, info: EngineInfo, request: TokenRequest) -> TokenResponse:
        body = msgspec.json.encode(
            {
                "model": info.model,
                "prompt": request.input_ids.tolist(),
                "n": 1,
                "stream": False,
                "logprobs": 0,
                "return_token_ids": True,
                **wire.sampling_fields(request.sampling),
            }
        )

        def prepare(request_id: str) -> HttpRequest:
            return HttpRequest("/v1/completions", body, {"X-Request-Id": request_id})

        return self._response(request, await self.exchange(request.request_id, prepare, wire.Completion))

    def _response(self, request: TokenRequest, answer: Answer[wire.Completion]) -> TokenResponse:
        checks = Checks(self.name, request.request_id)
        if len(answer.value.choices) != 1:
            raise checks.violation(f"Law 4: one completion was asked for, {len(answer.value.choices)} came.")
        choice, usage = answer.value.choices[0], answer.value.usage
        finish = checks.finish(choice.finish_reason)
        if choice.token_ids is None or choice.logprobs is None:
            raise checks.violation("Law 4: the answer holds no token ids or no logprobs: this vLLM is too old.")
        checks.echo(request.input_ids, choice.prompt_token_ids)
        ids, logprobs = checks.output(choice.token_ids, choice.logprobs.token_logprobs, request)
        checks.count("usage.prompt_tokens", usage.prompt_tokens, len(request.input_ids))
        checks.count("usage.completion_tokens", usage.completion_tokens, len(ids))
        stop = _stop(finish, choice.stop_reason, int(ids[-1]))
        checks.finish_agrees(finish, ids, stop, request)
        return TokenResponse(
            output_ids=ids,
            logprobs=logprobs,
            finish=finish,
            stop=stop,
            prompt_length=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
            latency_s=answer.latency_s,
            request_id=answer.request_id,
            versions=checks.versions((), len(ids)),  # /v1/completions does not tell weight versions
        )

    async def score(self, token_ids: Sequence[int]) -> Logprobs:
        """Score by `prompt_logprobs`, which are raw in every logprob mode."""
        info = await self.connect()
        body = {
            "model": info.model,
            "prompt": [int(token) for token in token_ids],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        completion = await self.post("/v1/completions", body, wire.Completion)
        entries = completion.choices[0].prompt_logprobs or []
        if len(entries) != len(token_ids):
            raise ProtocolViolationError(
                f"{len(token_ids)} ids were sent for scoring, the server scored {len(entries)}.", backend=self.name
            )
        scores = [_score(entry, int(token)) for entry, token in zip(entries, token_ids, strict=True)]
        return np.array(scores, np.float32)

    async def abort(self, request_id: str) -> None:
        """Do nothing: closing the connection, which has happened by now, is vLLM's abort for `/v1/completions`."""


def _stop(finish: Finish, reason: int | str | None, last_id: int) -> int | str | None:
    """Give what stopped it: vLLM reports null for the model's own end-of-sequence token."""
    if finish != Finish.STOP:
        return None
    return last_id if reason is None else reason


def _score(entry: dict[str, wire.PromptLogprob] | None, token: int) -> float:
    if entry is None:
        return float("nan")
    if str(token) not in entry:
        raise ProtocolViolationError(
            f"The server scored tokens {sorted(entry)} where {token} was sent.", backend=VLLMBackend.name
        )
    return entry[str(token)].logprob
