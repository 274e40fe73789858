"""The vLLM backend: token ids in and out over `/inference/v1/generate`, or `/v1/completions` where that is disabled."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from tito_core.backend.errors import BadRequestError, ProtocolViolationError, task_group
from tito_core.backend.http.backend import HttpBackend, changing_weights
from tito_core.backend.http.body import AnswerSize, answer_size, size_of
from tito_core.backend.http.client import HttpRequest
from tito_core.backend.http.errors import NOT_OFFERED
from tito_core.backend.id_text import IdText, Pieces
from tito_core.backend.images import ImageSupport, PromptImages
from tito_core.backend.protocol import EngineInfo, OnChunk, RawResponse, RawScores, Running, TokenRequest
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Adapter
from tito_vllm import wire

_SCORING = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0}
"""`top_k` is required by --return-sampling-mask."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_DEV_MODE = "VLLM_SERVER_DEV_MODE=1 in its environment: it has no endpoints for pauses and new weights"
_COMPLETIONS, _GENERATE = "/v1/completions", "/inference/v1/generate"


class VLLMBackend(HttpBackend):
    """Backend of one vLLM server. Arguments: see `HttpBackend`."""

    name = "vllm"

    async def discover(self) -> EngineInfo:
        """Query the server's properties; see `HttpBackend.discover`."""
        model = await self.served_model()
        async with task_group() as group:
            version_task = group.create_task(self.get_optional("/version", wire.Version))
            weights_task = group.create_task(self.weight_version())
            is_open, is_told = await self._endpoints(model.id)
            images_task = group.create_task(self._images(model.id, is_open))
            grammar_task = group.create_task(self._constrains(model.id, is_told))
            limit_task = group.create_task(self._limit(model.id, is_open))
        capabilities = wire.capabilities(limit_task.result(), one_more=is_open, grammar=grammar_task.result())
        version = version_task.result()
        return EngineInfo(
            self.name,
            model.id,
            model.max_model_len,
            version.version if version else None,
            weights_task.result(),
            endpoints=(_GENERATE, _COMPLETIONS) if is_open else (_COMPLETIONS,),
            capabilities=capabilities,
            images=images_task.result(),
            raw_before_penalties=True,  # of the model's own logits; measured with 0.32.0
            extra_fields=wire.EXTRA_FIELDS,
        )

    async def _images(self, model: str, is_open: bool) -> ImageSupport:
        """Read the server's limit of images from its refusal of too many.

        A server that takes none, or does not know `content_parts`, refuses something else.
        """
        if not is_open:
            return wire.image_support(None)
        parts = [{"type": "image_url", "uuid": "probe"}] * wire.IMAGES_PROBED
        sampling = {"logprobs": wire.TOO_MANY_LOGPROBS, "max_tokens": 1}
        probe = {"model": model, "token_ids": [0], "sampling_params": sampling, "content_parts": parts}
        refused = await self.refusal(_GENERATE, msgspec.json.encode(probe), wire.Generation)
        return wire.image_support("" if refused is None else refused.body)

    async def _constrains(self, model: str, is_told: bool) -> bool | None:
        """Return whether a grammar constrains answers from their first token; None if unknown.

        With `--reasoning-parser` the engine applies a grammar after the reasoning, unless `reasoning_ended` is sent,
        which only `/inference/v1/generate` of 0.32 or newer reads.
        """
        if is_told:
            return True
        budget = msgspec.json.encode({"model": model, **wire.BUDGET_PROBE})
        async with task_group() as group:
            refusal_task = group.create_task(self.refusal(_COMPLETIONS, budget, wire.TextCompletion))
            answer_task = group.create_task(self._probe_of_grammars(model))
        refused = refusal_task.result()
        return wire.constrains_all(None if refused is None else refused.body, answer_task.result())

    async def _probe_of_grammars(self, model: str) -> wire.TextCompletion | None:
        body = msgspec.json.encode({"model": model, **wire.GRAMMAR_PROBE})
        try:
            return await self.ask(_COMPLETIONS, wire.TextCompletion, body)
        except BadRequestError as error:
            error.with_traceback(None)
            return None

    async def _limit(self, model: str, is_open: bool) -> str:
        """Return the server's refusal of too many top logprobs, which names its limit; empty if it took them."""
        excessive = {"logprobs": wire.TOO_MANY_LOGPROBS, "max_tokens": 1}
        path, probe = _COMPLETIONS, {"model": model, "prompt": [0], **excessive}
        if is_open:
            path, probe = _GENERATE, {"model": model, "token_ids": [0], "sampling_params": excessive}
        refused = await self.refusal(path, msgspec.json.encode(probe), wire.TextCompletion)
        return "" if refused is None else refused.body

    async def _endpoints(self, model: str) -> tuple[bool, bool]:
        """Return whether the server has `/inference/v1/generate`, and whether that reads `reasoning_ended`.

        Its refusal of an empty prompt tells: without `--enable-scale-out` 0.32 answers 403, and 0.30 answers 404; from
        0.32 it also refuses the value of `reasoning_ended`, which older versions ignore.
        """
        probe = {"model": model, "token_ids": [], "sampling_params": {"max_tokens": 1}, "reasoning_ended": "unknown"}
        refused = await self.refusal(_GENERATE, msgspec.json.encode(probe), wire.Generation)
        if refused is not None and refused.status == 401:
            raise refused
        is_open = refused is None or refused.status not in NOT_OFFERED
        return is_open, is_open and refused is not None and wire.reads_reasoning_ended(refused.body)

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample one completion; see `Backend.generate`.

        `/inference/v1/generate` is preferred: the only endpoint that reports weight versions and takes images.
        """
        info, prompt = await self.checked_info(), request.id_text or IdText.of(request.input_ids)
        generates = info.endpoints[0] == _GENERATE
        if wire.must_not_stream(request.optional_outputs, generates=generates):
            on_chunk = None
        path, size = (_GENERATE if generates else _COMPLETIONS), answer_size(request)
        fields = wire.generation_fields if generates else wire.completion_fields
        body = prompt.body(fields(info, request, on_chunk), "token_ids" if generates else "prompt")
        kind: type[wire.Generation | wire.Completion] = wire.Generation if generates else wire.Completion
        headers = {} if request.session_id is None else {"X-Session-ID": request.session_id}  # for vLLM's router
        if request.session_id is not None and self._ranks is not None and self._ranks > 1:
            headers["X-data-parallel-rank"] = str(self.rank_of(request.session_id))
        answer = await self.send_generation(
            request.request_id,
            lambda running: _post(path, body, running, size, headers),
            kind,
            assembler=partial(wire.EventAssembler, kind),
            on_chunk=on_chunk,
            prompt=request.echo_text,
            probe=request.is_probe,
        )
        if len(answer.value.choices) != 1:
            problem = f"Law 4: one completion was requested, but the server returned {len(answer.value.choices)}."
            raise ProtocolViolationError(problem, backend=self.name, request_id=request.request_id)
        reported = wire.reported(answer.value, request, answer.request_id, unordered=answer.unordered)
        return await self.counted(RawResponse(latency_s=answer.latency_s, **reported))

    async def score_ids(self, token_ids: TokenIds, of: TokenIds) -> RawScores:
        """Score over `/inference/v1/generate`, which takes a row of ids for each token but the first.

        vLLM 0.30 takes no notice of them, and the V1 model runner, as on a CPU, refuses them (0.32.0).
        """
        rows = {"prompt_logprob_token_ids": [of.tolist()] * (len(token_ids) - 1)}
        return await self._generated_scores(token_ids, None, size_of(len(token_ids), 1, scores=1 + len(of)), rows)

    async def score(self, token_ids: TokenIds, adapter: Adapter | None = None) -> RawScores:
        """Score with `prompt_logprobs`, which are raw in every logprob mode."""
        fields = {"model": wire.model_of(await self.connect(), adapter), **_SCORING}
        body, size = IdText.of(token_ids).body(fields, "prompt"), size_of(len(token_ids), 1, scores=1)
        answer = await self.send_generation(
            uuid.uuid4().hex, lambda running: _post(_COMPLETIONS, body, running, size), wire.Completion, probe=True
        )
        choices = answer.value.choices
        scored = choices[0].prompt_logprobs if choices else None
        return await self.counted(wire.raw_scores(scored, answer.value, answer.request_id))

    async def score_with_images(
        self, token_ids: TokenIds, images: PromptImages, adapter: Adapter | None = None
    ) -> RawScores:
        """Score over `/inference/v1/generate`: `/v1/completions` ignores images."""
        size = size_of(len(token_ids) + sum(images.lengths), 1, scores=1)
        return await self._generated_scores(token_ids, adapter, size, {}, content_parts=wire.image_parts(images.images))

    async def _generated_scores(
        self, token_ids: TokenIds, adapter: Adapter | None, size: AnswerSize, sampling: Mapping[str, Any], **more: Any
    ) -> RawScores:
        model, sampling = wire.model_of(await self.connect(), adapter), {**_SCORING, "logprobs": 0, **sampling}
        body = IdText.of(token_ids).body({"model": model, "sampling_params": sampling, **more}, "token_ids")
        answer = await self.send_generation(
            uuid.uuid4().hex, lambda running: _post(_GENERATE, body, running, size), wire.Generation, probe=True
        )
        return await self.counted(wire.raw_scores(answer.value.prompt_logprobs, answer.value, answer.request_id))

    async def pause(self, running: Running = "keep") -> None:
        """Pause. Every mode clears the prefix cache, so that keys and values of older weights are not reused."""
        await self.http.send(HttpRequest(f"/pause?mode={running}", needs=_DEV_MODE))

    async def resume(self) -> None:
        """See `EngineAdmin.resume`."""
        await self.http.send(HttpRequest("/resume", needs=_DEV_MODE))

    async def weight_version(self) -> str | None:
        """See `EngineAdmin.weight_version`; "default" until one is set."""
        info = await self.get_optional("/weight_info", wire.WeightInfo)
        return info.weight_version if info else None

    async def load_weights(
        self, path: str, version: str, *, running: Running = "keep", images_uncached: bool = False
    ) -> None:
        """See `EngineAdmin.load_weights`; the server needs `VLLM_SERVER_DEV_MODE=1`.

        Measured with 0.32.0, whose engine crashes if the folder does not exist. A pause clears its features of images.
        """
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        async with changing_weights(self, path, version, running):
            await self.http.send(HttpRequest("/collective_rpc", msgspec.json.encode(reload), needs=_DEV_MODE))
            named = msgspec.json.encode({"new_version": version})
            await self.http.send(HttpRequest("/update_weight_version", named, needs=_DEV_MODE))

    @staticmethod
    def adapter_request(name: str, path: str | None) -> HttpRequest:
        """See `HttpBackend.adapter_request`; the server needs `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`."""
        fields = {"lora_name": name, **({} if path is None else {"lora_path": path})}
        return HttpRequest(f"/v1/{'un' if path is None else ''}load_lora_adapter", msgspec.json.encode(fields))

    @staticmethod
    def abort_request(request_id: str) -> HttpRequest:
        """See `HttpBackend.abort_request`; one id per endpoint. Only a server with `--enable-scale-out` offers it."""
        body = msgspec.json.encode({"request_ids": [f"cmpl-{request_id}-0", f"generate-tokens-{request_id}"]})
        return HttpRequest("/inference/v1/abort_requests", body)


def _post(
    path: str, body: bytes | Pieces, running: str, size: AnswerSize, headers: Mapping[str, str] = NO_HEADERS
) -> HttpRequest:
    """Return a POST with a header for the try's request id."""
    return HttpRequest(path, body, {"X-Request-Id": running, **headers}, size)
