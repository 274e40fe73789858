"""SGLang as a backend: token ids in and out over `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tito_core.backend.answer import Checks, Reported
from tito_core.backend.answer_sizes import AnswerSize, answer_size, size_of
from tito_core.backend.errors import AuthenticationError
from tito_core.backend.exchanges import Answer
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import EngineInfo, OnChunk, TokenRequest, TokenResponse
from tito_core.backend.streaming import streaming_to
from tito_core.backend.together import together
from tito_core.backend.transport import HttpRequest
from tito_core.ledger.columns import TokenIds
from tito_sglang import stream, wire
from tito_sglang.admin import SGLangAdmin


class SGLangBackend(SGLangAdmin):
    """Speaks to one SGLang server. Arguments: see `HttpBackend`."""

    name = "sglang"

    async def _discover(self) -> EngineInfo:
        model = await self.served_model()
        async with together() as group:
            asked_loads = group.create_task(self.get_if_there("/v1/loads", wire.Loads))
            weights = group.create_task(self.weight_version())
            server = group.create_task(self.get_if_there("/server_info", wire.ServerInfo))
            vocab_size = await self._vocab_size()
        loads = asked_loads.result() or wire.Loads()
        return EngineInfo(
            self.name,
            model.id,
            wire.usable_length(model.max_model_len, loads),
            loads.version,
            weights.result(),
            vocab_size=vocab_size,
            capabilities=wire.capabilities(server.result(), vocab_size),
        )

    async def _vocab_size(self) -> int | None:
        """Learn the size of the vocabulary, past which an id kills the server, from a request that it refuses."""
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(wire.NO_TOKEN): 0.0}}}
        refused = await self.refusal("/generate", msgspec.json.encode(probe))
        if isinstance(refused, AuthenticationError):
            raise refused
        return None if refused is None else wire.vocab_size_in(refused.body)

    async def _generate(
        self, info: EngineInfo, request: TokenRequest, prompt: IdText, on_chunk: OnChunk | None
    ) -> TokenResponse:
        fields: dict[str, Any] = {
            "sampling_params": wire.sampling_fields(request.sampling),
            **wire.wanted_fields(request),
            **info.capabilities.service(request.wanted),
            "return_prompt_token_ids": request.echo,
        }
        if on_chunk is not None:
            fields["sampling_params"]["stream_interval"] = stream.interval(request)
        size = answer_size(request, repeats=stream.events(request))
        answer = await self._ask(request.request_id, fields, prompt, size, request.session_id, on_chunk)
        meta = answer.value.meta_info
        reason = meta.finish_reason or wire.FinishReason("none")
        entries = meta.output_token_logprobs
        said = Reported(
            finish=reason.type,
            stop=reason.matched,
            output_ids=answer.value.output_ids,
            logprobs=None if entries is None else [entry.logprob for entry in entries],
            logprob_ids=[entry.token for entry in entries or ()],
            echoed=answer.value.prompt_token_ids,
            prompt_tokens=meta.prompt_tokens,
            completion_tokens=meta.completion_tokens,
            cached_tokens=meta.cached_tokens,
            spans=[(span.start, span.end, span.version) for span in meta.weight_versions],
            message=reason.message,
            beside=wire.beside(meta, request),
        )
        checks = Checks(self.name, request.request_id)
        return checks.response(said, request, latency_s=answer.latency_s, running_id=answer.request_id)

    async def _scored(
        self, info: EngineInfo, ids: TokenIds, request_id: str
    ) -> Sequence[tuple[int | None, float | None]]:
        """Score by `input_token_logprobs` without generating; they are raw."""
        fields = {"sampling_params": {"max_new_tokens": 0, "temperature": 0.0}, "logprob_start_len": 0}
        answer = await self._ask(request_id, fields, IdText.of(ids), size_of(len(ids), 0, scores=True))
        return [(entry.token, entry.logprob) for entry in answer.value.meta_info.input_token_logprobs or ()]

    async def _ask(
        self,
        request_id: str,
        fields: dict[str, Any],
        prompt: IdText,
        size: AnswerSize,
        session: str | None = None,
        on_chunk: OnChunk | None = None,
    ) -> Answer[wire.Generation]:
        headers = {"X-SMG-Routing-Key": session} if session else {}  # for SGLang's router

        def prepare(running: str) -> HttpRequest:
            complete = {**fields, "return_logprob": True, "stream": on_chunk is not None, "rid": running}
            return HttpRequest("/generate", prompt.body(complete, "input_ids"), headers, size)

        streaming = streaming_to(on_chunk, lambda: stream.Events(size.body))
        return await self.exchange(request_id, prepare, wire.Generation, streaming, prompt)

    @staticmethod
    def _abort_call(request_id: str) -> HttpRequest:
        return HttpRequest("/abort_request", msgspec.json.encode({"rid": request_id}))
