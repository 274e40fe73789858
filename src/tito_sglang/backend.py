"""The SGLang backend: token ids in and out over `/generate`."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tito_core.backend.errors import BadRequestError, UnsupportedByServerError, task_group
from tito_core.backend.http.backend import HttpBackend, changing_weights
from tito_core.backend.http.body import AnswerSize, answer_size, size_of
from tito_core.backend.http.client import HttpRequest
from tito_core.backend.id_text import IdText
from tito_core.backend.images import PromptImages, expanded
from tito_core.backend.protocol import EngineInfo, OnChunk, RawResponse, RawScores, Running, TokenRequest
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Adapter
from tito_sglang import wire

_PAUSES: dict[Running, str] = {"keep": "retract", "abort": "abort"}
"""Not `in_place`, which keeps keys and values of the old weights: logprobs would match neither version."""


class SGLangBackend(HttpBackend):
    """Backend of one SGLang server. Arguments: see `HttpBackend`."""

    name = "sglang"
    _reported_ranks: int | None = None
    """The ranks that the server reported last, where no `data_parallel_size` was given."""
    _route = wire.DIRECT

    async def discover(self) -> EngineInfo:
        """Query the server's properties; see `HttpBackend.discover`."""
        model = await self.served_model()
        async with task_group() as group:
            loads_task = group.create_task(self.get_optional("/v1/loads", wire.Loads))
            model_task = group.create_task(self._model_info())
            server_task = group.create_task(self.get_optional("/server_info", wire.ServerInfo))
            vocab_size, self._route = await self._probe()
        server = server_task.result() or wire.ServerInfo()
        if self._ranks == self._reported_ranks:  # a restarted server may have others
            self._ranks = self._reported_ranks = server.dp_size
        loads, info = loads_task.result() or wire.Loads(), model_task.result()
        wire.refuse_preferred((info and info.preferred_sampling_params) or ())
        return EngineInfo(
            self.name,
            server.served_model_name or model.id,
            wire.usable_length(model.max_model_len, loads),
            loads.version,
            info.weight_version if info else None,
            vocab_size=vocab_size,
            capabilities=wire.capabilities(server_task.result(), vocab_size),
            images=wire.image_support(info, server_task.result(), self._route),
            extra_fields=wire.EXTRA_FIELDS,
        )

    async def _model_info(self) -> wire.ModelInfo | None:
        """Query the model; routers pass on the older path only."""
        found = await self.get_optional("/model_info", wire.ModelInfo)
        return found or await self.get_optional("/get_model_info", wire.ModelInfo)

    async def first_name(self) -> str | None:
        """See `HttpBackend.first_name`."""
        server = await self.get_optional("/server_info", wire.ServerInfo)
        return server.served_model_name if server else None

    async def _probe(self) -> tuple[int | None, wire.Route]:
        """Read the size of the vocabulary from a refused request; a larger id would crash the server.

        Where a router drops what is refused, the answer shows what else it drops.

        Raises:
            UnsupportedByServerError: See `wire.route_of`.
        """
        try:
            answer = await self.ask("/generate", wire.Generation, msgspec.json.encode(wire.PROBE))
        except BadRequestError as error:
            error.with_traceback(None)
            return wire.vocab_size_in(error.body), wire.DIRECT
        return None, wire.route_of(answer, self.http.base_url)

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample one completion; see `Backend.generate`."""
        info, prompt = await self.checked_info(), request.id_text or IdText.of(request.input_ids)
        route = self._route
        size = answer_size(request, repeats=0 if on_chunk is None else wire.stream_events(request, route))
        fields = wire.generation_fields(info, request, on_chunk, route)
        if request.session_id is not None and self._ranks is not None and self._ranks > 1:
            fields["routed_dp_rank"] = self.rank_of(request.session_id)
        answer = await self.send_generation(
            request.request_id,
            _prepare(fields, prompt, size, request.session_id),
            wire.Generation,
            assembler=partial(wire.EventAssembler, size.body),
            on_chunk=on_chunk,
            prompt=request.echo_text,
            probe=request.is_probe,
        )
        reported = wire.reported(
            answer.value, request, answer.request_id, info.vocab_size, route, unordered=answer.unordered
        )
        return await self.counted(RawResponse(latency_s=answer.latency_s, **reported))

    async def score(self, token_ids: TokenIds, adapter: Adapter | None = None) -> RawScores:
        """Score with `input_token_logprobs`, which are raw, without generating."""
        return await self._scored(token_ids, token_ids, wire.adapter_fields(adapter))

    async def score_ids(self, token_ids: TokenIds, of: TokenIds) -> RawScores:
        """See `IdScorer`."""
        return await self._scored(token_ids, token_ids, {"token_ids_logprob": of.tolist()}, scores=1 + len(of))

    async def score_with_images(
        self, token_ids: TokenIds, images: PromptImages, adapter: Adapter | None = None
    ) -> RawScores:
        """See `ImageScorer`; inside an image the server reports the id 0 and other numbers."""
        whole = expanded(token_ids, images.placeholder, images.lengths)
        return await self._scored(token_ids, whole, wire.image_fields(images.images) | wire.adapter_fields(adapter))

    async def _scored(self, token_ids: TokenIds, whole: TokenIds, more: dict[str, Any], scores: int = 2) -> RawScores:
        sampling = {**wire.NEUTRAL, "max_new_tokens": 0, "temperature": 0.0}
        again = {"token_ids_logprob": whole[-1:].tolist()}
        fields = {"sampling_params": sampling, "logprob_start_len": 0, **again, **more}
        size = size_of(len(whole), 0, scores=scores)
        prepare = _prepare({**fields, "stream": False}, IdText.of(token_ids), size)
        answer = await self.send_generation(uuid.uuid4().hex, prepare, wire.Generation, probe=True)
        meta, info = answer.value.meta_info, await self.connect()
        scored = wire.scored_prompt(meta, whole, info.vocab_size)
        wire.check_own(meta, scored)
        return await self.counted(wire.raw_scores(meta, scored, answer.request_id))

    async def pause(self, running: Running = "keep") -> None:
        """Pause. Kept generations are recomputed from their tokens."""
        await self.http.send(_admin("/pause_generation", {"mode": _PAUSES[running]}))

    async def resume(self) -> None:
        """See `EngineAdmin.resume`."""
        await self.http.send(_admin("/continue_generation", {}))

    async def weight_version(self) -> str | None:
        """See `EngineAdmin.weight_version`; "default" until one is set."""
        info = await self._model_info()
        return info.weight_version if info else None

    async def load_weights(
        self, path: str, version: str, *, running: Running = "keep", images_uncached: bool = False
    ) -> None:
        """See `EngineAdmin.load_weights`. Measured with 0.5.23, which crashes on weights of another shape.

        It keeps the features of images that it has seen, and no endpoint tells whether that cache is off: after an
        update, a repeated image had logprobs 1.9 nats off under the new version's name.
        """
        model = None if images_uncached else await self.get_optional("/model_info", wire.ModelInfo)
        if not images_uncached and (model is None or model.has_image_understanding):
            takes = "takes images" if model is not None else "does not tell whether it takes images (/model_info),"
            raise UnsupportedByServerError(
                f"The server {takes} and may keep their features of the old weights, so {path!r} was not loaded. For a "
                "model of text pass images_uncached=True; else start it with SGLANG_VLM_CACHE_SIZE_MB=0 in its "
                "environment too.",
                backend=self.name,
            )
        update = {"model_path": path, "weight_version": version, "flush_cache": True}
        async with changing_weights(self, path, version, running):
            await self.http.send(_admin("/update_weights_from_disk", update))

    @staticmethod
    def adapter_request(name: str, path: str | None) -> HttpRequest:
        """See `HttpBackend.adapter_request`."""
        fields = {"lora_name": name, **({} if path is None else {"lora_path": path})}
        return _admin(f"/{'un' if path is None else ''}load_lora_adapter", fields)

    @staticmethod
    def abort_request(request_id: str) -> HttpRequest:
        """See `HttpBackend.abort_request`."""
        return _admin("/abort_request", {"rid": request_id})


def _prepare(
    fields: dict[str, Any], prompt: IdText, size: AnswerSize, session: str | None = None
) -> Callable[[str], HttpRequest]:
    """Return what builds the request of a try from its id; the header is for SGLang's router."""
    headers = {"X-SMG-Routing-Key": session} if session else {}

    def prepare(running: str) -> HttpRequest:
        body = prompt.body({**fields, "return_logprob": True, "rid": running}, "input_ids")
        return HttpRequest("/generate", body, headers, size)

    return prepare


def _admin(path: str, body: dict[str, Any]) -> HttpRequest:
    """Return a request that needs `--admin-api-key` where the server has one."""
    return HttpRequest(path, msgspec.json.encode(body), admin=True)
