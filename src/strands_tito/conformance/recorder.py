"""Records a backend's raw responses before the core checks them: the oracle's source where it cannot read the wire."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec
import numpy as np

from strands_tito.conformance.laws import set_place
from strands_tito.conformance.wire_reading import WireGeneration
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.id_text import SAME_ECHO
from tito_core.backend.images import PromptImages, expanded
from tito_core.backend.protocol import Backend, ImageScorer, Integers, OnChunk, RawResponse, RawScores, TokenRequest
from tito_core.ledger.columns import TokenIds

Recorded = tuple[TokenRequest, RawResponse]
"""A request of the core, and the backend's raw response."""


class Recorder:
    """A backend that forwards everything to another one, and records its generations.

    Attributes:
        inner: The backend under test.
        recorded: Its generations, in the order of the responses.
        requests: Generations and scores that were requested so far.
        on_request: Called before each of them.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.recorded: list[Recorded] = []
        self.requests = 0
        self.on_request: Callable[[], None] = lambda: None

    async def connect(self) -> EngineInfo:
        """See `Backend.connect`."""
        return await self.inner.connect()

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """See `Backend.generate`."""
        self._count()
        sampling = request.sampling.model_dump(mode="json", exclude_defaults=True)
        set_place(sampling=sampling, streamed=on_chunk is not None)
        raw = await (self.inner.generate(request) if on_chunk is None else self.inner.generate(request, on_chunk))
        self.recorded.append((request, raw))
        return raw

    async def score(self, token_ids: TokenIds) -> RawScores:
        """See `Backend.score`."""
        self._count()
        return await self.inner.score(token_ids)

    async def score_with_images(self, token_ids: TokenIds, images: PromptImages) -> RawScores:
        """See `ImageScorer`; only for a backend that is one."""
        self._count()
        return await cast(ImageScorer, self.inner).score_with_images(token_ids, images)

    async def tokenize(self, text: str) -> Integers | None:
        """See `Backend.tokenize`."""
        return await self.inner.tokenize(text)

    async def abort(self, request_id: str) -> None:
        """See `Backend.abort`."""
        await self.inner.abort(request_id)

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.inner.aclose()

    def _count(self) -> None:
        self.requests += 1
        self.on_request()


def generations(recorded: Iterable[Recorded]) -> list[WireGeneration]:
    """Convert raw responses to what the oracle reads."""
    return [_generation(request, raw) for request, raw in recorded]


def _generation(request: TokenRequest, raw: RawResponse) -> WireGeneration:
    output, prompt, images = _as_list(raw.output_ids), request.input_ids.tolist(), request.images
    echo = prompt if images is None else expanded(request.input_ids, images.placeholder, images.lengths).tolist()
    top = raw.top_logprobs() if callable(raw.top_logprobs) else raw.top_logprobs
    return WireGeneration(
        request_id=raw.request_id or request.request_id,
        prompt_ids=prompt,
        images=[] if images is None else [image.data for image in images.images],
        image_names=[] if images is None else [None] * len(images.images),
        image_spans=None if images is None or raw.media is None else [(int(o), int(n)) for o, n in raw.media],
        image_tokens=raw.image_tokens,
        sampling=request.sampling.model_dump(mode="json"),
        echoed_ids=echo if isinstance(raw.echoed, msgspec.Raw) and raw.echoed == SAME_ECHO else _ids(raw.echoed),
        output_ids=output,
        logprobs=_as_list(raw.logprobs),
        logprob_ids=output if raw.logprob_ids is None else _as_list(raw.logprob_ids),
        finish=raw.finish,
        stop=raw.stop,
        prompt_tokens=raw.prompt_tokens,
        completion_tokens=raw.completion_tokens,
        cached_tokens=raw.cached_tokens,
        versions=list(raw.versions) or None,
        top_logprobs=None if top is None else [[(int(token or 0), logprob) for token, logprob in row] for row in top],
        prompt_logprobs=[(int(token or 0), logprob) for token, logprob in raw.prompt_logprobs or ()],
        routed_experts=_base64(raw.routed_experts),
        sampling_masks=None if raw.sampling_mask is None else [_as_list(row) for row in raw.sampling_mask],
    )


def _as_list(values: Any) -> list[Any]:
    """Convert a list or an array to a list of Python values."""
    return list(values.tolist() if isinstance(values, np.ndarray) else values or ())


def _ids(echoed: Any) -> list[int] | None:
    if isinstance(echoed, bytes | msgspec.Raw):
        ids: list[int] | None = json.loads(bytes(echoed))
        return ids
    return None if echoed is None else _as_list(echoed)


def _base64(experts: Any) -> str | None:
    if isinstance(experts, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(experts, "<i4").tobytes()).decode()
    return str(experts) if experts is not None else None
