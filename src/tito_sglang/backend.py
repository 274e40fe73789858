"""SGLang as a backend: token ids in and out over `/generate`."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

import msgspec

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import AuthenticationError
from tito_core.backend.http.backend import HttpBackend, changing_weights
from tito_core.backend.http.bodies import AnswerSize, answer_size, size_of
from tito_core.backend.http.in_flight import Answer
from tito_core.backend.http.transport import HttpRequest
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import OnChunk, RawResponse, RawScores, Running, TokenRequest
from tito_core.backend.retries import together
from tito_core.ledger.columns import TokenIds
from tito_sglang import wire

_PAUSES: dict[Running, str] = {"keep": "retract", "abort": "abort"}
"""`in_place` would keep keys and values of the older weights, and recorded logprobs would be of neither."""


class SGLangBackend(HttpBackend):
    """Speaks to one SGLang server. Arguments: see `HttpBackend`."""

    name = "sglang"

    async def discover(self) -> EngineInfo:
        """Ask the server what it is; see `HttpBackend.discover`."""
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

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample one completion; see `Backend.generate`."""
        info, prompt = await self.connect(), request.text or IdText.of(request.input_ids)
        fields: dict[str, Any] = {
            "sampling_params": wire.sampling_fields(request.sampling),
            **wire.optional_request_fields(request),
            **info.capabilities.service(request.optional_outputs),
            "return_prompt_token_ids": request.echo,
        }
        if on_chunk is not None:
            fields["sampling_params"]["stream_interval"] = wire.stream_interval(request)
        size = answer_size(request, repeats=wire.stream_events(request))
        answer = await self._ask(request.request_id, fields, prompt, size, request.session_id, on_chunk)
        meta = answer.value.meta_info
        reason = meta.finish_reason or wire.FinishReason("none")
        entries = meta.output_token_logprobs
        return RawResponse(
            finish=reason.type,
            stop=reason.matched,
            output_ids=answer.value.output_ids,
            logprobs=None if entries is None else [entry.logprob for entry in entries],
            logprob_ids=[entry.token for entry in entries or ()],
            echoed=answer.value.prompt_token_ids,
            prompt_tokens=meta.prompt_tokens,
            completion_tokens=meta.completion_tokens,
            cached_tokens=meta.cached_tokens,
            versions=[(span.start, span.end, span.version) for span in meta.weight_versions],
            message=None if reason.message is None else self.http.hide_key(reason.message),
            latency_s=answer.latency_s,
            request_id=answer.request_id,
            **wire.optional_response_fields(meta, request),
        )

    async def score(self, token_ids: TokenIds) -> RawScores:
        """Score by `input_token_logprobs` without generating; they are raw."""
        fields = {"sampling_params": {"max_new_tokens": 0, "temperature": 0.0}, "logprob_start_len": 0}
        size = size_of(len(token_ids), 0, scores=True)
        answer = await self._ask(uuid.uuid4().hex, fields, IdText.of(token_ids), size)
        return wire.raw_scores(answer.value.meta_info.input_token_logprobs, answer.request_id)

    async def pause(self, running: Running = "keep") -> None:
        """Pause; generations that are kept are computed again from their tokens."""
        await self.http.send(HttpRequest("/pause_generation", msgspec.json.encode({"mode": _PAUSES[running]})))

    async def resume(self) -> None:
        """Let generations go on."""
        await self.http.send(HttpRequest("/continue_generation", b"{}"))

    async def weight_version(self) -> str | None:
        """Ask for the version; "default" until one is named."""
        said = await self.get_if_there("/model_info", wire.ModelInfo)
        return said.weight_version if said else None

    async def load_weights(self, path: str, version: str, *, running: Running = "keep") -> None:
        """See `EngineAdmin.load_weights`. Measured with 0.5.23, which dies of weights of another shape."""
        update = {"model_path": path, "weight_version": version, "flush_cache": True}
        async with changing_weights(self, path, version, running):
            await self.http.send(HttpRequest("/update_weights_from_disk", msgspec.json.encode(update)))

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

        gather = partial(wire.Events, size.body)
        return await self.exchange(
            request_id, prepare, wire.Generation, gather=gather, on_chunk=on_chunk, prompt=prompt
        )

    @staticmethod
    def abort_request(request_id: str) -> HttpRequest:
        """See `HttpBackend.abort_request`."""
        return HttpRequest("/abort_request", msgspec.json.encode({"rid": request_id}))
