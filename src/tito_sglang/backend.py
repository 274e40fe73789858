"""SGLang as a backend: token ids in and out over `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tito_core.backend.errors import ProtocolViolationError
from tito_core.backend.http_backend import Answer, HttpBackend
from tito_core.backend.protocol import EngineInfo, TokenRequest, TokenResponse
from tito_core.backend.transport import HttpRequest
from tito_core.backend.validate import Checks
from tito_core.ledger.turn import Finish, Logprobs
from tito_sglang import wire


class SGLangBackend(HttpBackend):
    """Speaks to one SGLang server. Arguments: see `HttpBackend`."""

    name = "sglang"

    async def _discover(self) -> EngineInfo:
        models = await self.get("/v1/models", wire.Models)
        model = self.choose_model(models.data)
        weights = await self.get("/model_info", wire.ModelInfo)
        loads = await self.get("/v1/loads", wire.Loads)
        return EngineInfo(self.name, model.id, model.max_model_len, loads.version, weights.weight_version)

    async def _generate(self, info: EngineInfo, request: TokenRequest) -> TokenResponse:
        body: dict[str, Any] = {
            "input_ids": request.input_ids.tolist(),
            "sampling_params": wire.sampling_fields(request.sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_prompt_token_ids": True,
            "stream": False,
        }

        def prepare(request_id: str) -> HttpRequest:
            return HttpRequest("/generate", msgspec.json.encode({**body, "rid": request_id}))

        return self._response(request, await self.exchange(request.request_id, prepare, wire.Generation))

    def _response(self, request: TokenRequest, answer: Answer[wire.Generation]) -> TokenResponse:
        checks = Checks(self.name, request.request_id)
        meta = answer.value.meta_info
        reason = meta.finish_reason or wire.FinishReason("none")
        finish = checks.finish(reason.type, said=reason.message)
        entries = meta.output_token_logprobs
        if entries is None:
            raise checks.violation("Law 4: the answer holds no output_token_logprobs, though return_logprob was sent.")
        checks.echo(request.input_ids, answer.value.prompt_token_ids)
        ids, logprobs = checks.output(answer.value.output_ids, [logprob for logprob, _, _ in entries], request)
        if ids.tolist() != [token for _, token, _ in entries]:
            raise checks.violation("Law 4: output_token_logprobs belong to other ids than output_ids.")
        checks.count("prompt_tokens", meta.prompt_tokens, len(request.input_ids))
        checks.count("completion_tokens", meta.completion_tokens, len(ids))
        stop = reason.matched if finish == Finish.STOP else None
        checks.finish_agrees(finish, ids, stop, request)
        return TokenResponse(
            output_ids=ids,
            logprobs=logprobs,
            finish=finish,
            stop=stop,
            prompt_length=len(request.input_ids),
            cached_tokens=meta.cached_tokens,
            latency_s=answer.latency_s,
            request_id=answer.request_id,
            versions=checks.versions([(span.start, span.end, span.version) for span in meta.weight_versions], len(ids)),
        )

    async def score(self, token_ids: Sequence[int]) -> Logprobs:
        """Score by `input_token_logprobs` without generating; they are raw."""
        body: dict[str, Any] = {
            "input_ids": [int(token) for token in token_ids],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        generation = await self.post("/generate", body, wire.Generation)
        entries = generation.meta_info.input_token_logprobs or []
        if [token for _, token, _ in entries] != body["input_ids"]:
            raise ProtocolViolationError(
                f"{len(token_ids)} ids were sent for scoring, the server scored others ({len(entries)} of them).",
                backend=self.name,
            )
        return np.array([np.nan if logprob is None else logprob for logprob, _, _ in entries], np.float32)

    async def abort(self, request_id: str) -> None:
        """Abort by id; an unknown id is answered 200 and does nothing."""
        await self.http.send_once(HttpRequest("/abort_request", msgspec.json.encode({"rid": request_id})))
