"""Every backend's raw responses, kept before the core checks them: what the oracle reads where it knows no wire."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from strands_tito.conformance.wire_reading import Heard
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.id_text import SAME_ECHO
from tito_core.backend.protocol import Backend, Integers, OnChunk, RawResponse, RawScores, TokenRequest
from tito_core.ledger.columns import TokenIds

Recorded = tuple[TokenRequest, RawResponse]
"""What the core asked of a backend, and what that said."""


class Recorder:
    """A backend that passes everything on to another one, and keeps what is generated.

    Attributes:
        inner: The backend under test.
        recorded: Its generations, in the order in which they were answered.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.recorded: list[Recorded] = []

    async def connect(self) -> EngineInfo:
        """See `Backend.connect`."""
        return await self.inner.connect()

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """See `Backend.generate`."""
        raw = await (self.inner.generate(request) if on_chunk is None else self.inner.generate(request, on_chunk))
        self.recorded.append((request, raw))
        return raw

    async def score(self, token_ids: TokenIds) -> RawScores:
        """See `Backend.score`."""
        return await self.inner.score(token_ids)

    async def tokenize(self, text: str) -> Integers | None:
        """See `Backend.tokenize`."""
        return await self.inner.tokenize(text)

    async def abort(self, request_id: str) -> None:
        """See `Backend.abort`."""
        await self.inner.abort(request_id)

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.inner.aclose()


def generations(recorded: Iterable[Recorded]) -> list[Heard]:
    """Return raw responses as the oracle reads them."""
    return [_heard(request, raw) for request, raw in recorded]


def _heard(request: TokenRequest, raw: RawResponse) -> Heard:
    output, prompt = _plain(raw.output_ids), request.input_ids.tolist()
    top = raw.top_logprobs() if callable(raw.top_logprobs) else raw.top_logprobs
    return Heard(
        name=raw.request_id or request.request_id,
        prompt=prompt,
        sampling=request.sampling.model_dump(mode="json"),
        echoed=prompt if isinstance(raw.echoed, msgspec.Raw) and raw.echoed == SAME_ECHO else _ids(raw.echoed),
        output=output,
        logprobs=_plain(raw.logprobs),
        logprob_ids=output if raw.logprob_ids is None else _plain(raw.logprob_ids),
        finish=raw.finish,
        stop=raw.stop,
        prompt_tokens=raw.prompt_tokens,
        completion_tokens=raw.completion_tokens,
        cached_tokens=raw.cached_tokens,
        versions=list(raw.versions) or None,
        top=None if top is None else [[(int(token or 0), logprob) for token, logprob in row] for row in top],
        scored=[(int(token or 0), logprob) for token, logprob in raw.prompt_logprobs or ()],
        experts=_base64(raw.routed_experts),
        masks=None if raw.sampling_mask is None else [_plain(row) for row in raw.sampling_mask],
    )


def _plain(values: Any) -> list[Any]:
    """Return a list or array as Python's own values."""
    return list(values.tolist() if isinstance(values, np.ndarray) else values or ())


def _ids(echoed: Any) -> list[int] | None:
    if isinstance(echoed, bytes | msgspec.Raw):
        found: list[int] | None = json.loads(bytes(echoed))
        return found
    return None if echoed is None else _plain(echoed)


def _base64(experts: Any) -> str | None:
    if isinstance(experts, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(experts, "<i4").tobytes()).decode()
    return str(experts) if experts is not None else None
