"""What was sent to a server and answered: a log of its wire, below the backend, and a recorder above it."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from tito_conformance.checks import NOTHING, Answered, set_place
from tito_conformance.wire import ReadExchange, WireExchange, WireGeneration, generations
from tito_core.backend.errors import hidden
from tito_core.backend.http.client import ConnectionPool, HttpResponse, HttpTransport
from tito_core.backend.http.watch import Watched
from tito_core.backend.id_text import SAME_ECHO, Pieces
from tito_core.backend.images import PromptImages, expanded
from tito_core.backend.protocol import (
    Backend,
    OnChunk,
    RawResponse,
    RawScores,
    TokenRequest,
)
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds

TransportFactory = Callable[[], HttpTransport]


class WireLog:
    """The exchanges of one run, in the order in which they started.

    Args:
        inner: Makes the transport of the requests; aiohttp's pool by default, as users have it.

    Attributes:
        exchanges: Those of the checks that are in progress.
        failed: How many requests of the whole run got no answer or one that a client retries, by what came instead.
    """

    def __init__(self, inner: TransportFactory = ConnectionPool) -> None:
        self.exchanges: list[WireExchange] = []
        self.failed: Counter[str] = Counter()
        self._inner = inner

    def bodies(self, request_id: str | None) -> dict[str, Any]:
        """Return what was sent and answered in a request, as text without API keys; empty if it is not in the log."""
        if not request_id:
            return {}
        name = request_id.encode()
        found = [each for each in self.exchanges if name in each.sent or request_id in each.headers.values()]
        return {
            f"{each.method} {each.path}": {
                "status": each.status,
                "sent": hidden(each.sent.decode(errors="replace"))[:MOST_BODY],
                "got": hidden(each.got.decode(errors="replace"))[:MOST_BODY],
            }
            for each in found
        }

    def transport(self) -> HttpTransport:
        """Return a transport that logs its exchanges: the `http_transport` of a backend."""
        return _LoggingTransport(self._inner(), self)


MOST_BODY = 100_000
"""Characters of a body that a report holds."""


class _LoggingTransport:
    def __init__(self, inner: HttpTransport, log: WireLog) -> None:
        self._inner = inner
        self._log = log

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        logged = {name.lower(): value for name, value in headers.items() if name.lower() != "authorization"}
        sent = body if isinstance(body, bytes) else b"".join(body)
        exchange = WireExchange(method, urlsplit(url).path, logged, sent)
        self._log.exchanges.append(exchange)
        try:
            reply = await self._inner.send(method, url, headers, body)
        except Exception as error:
            self._log.failed[type(error).__name__] += 1
            raise
        exchange.status = reply.status
        if reply.status == 429 or reply.status >= 500:
            self._log.failed[f"status {reply.status}"] += 1
        return msgspec.structs.replace(reply, raw=_logged(reply.raw, exchange))

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _logged(raw: AsyncIterator[bytes], exchange: WireExchange) -> AsyncIterator[bytes]:
    async for piece in raw:
        exchange.got += piece
        yield piece
    exchange.whole = True


class Recorder:
    """A backend that forwards everything to another one, counts what is sent, and notes what it must be compared with.

    Attributes:
        inner: The backend under test.
        log: The log of its wire; empty if it takes no transport.
        read: The reader of the log; None if nothing is logged, or if no installed package reads the wire.
        raw: The generations in the order of their answers, if nothing reads the wire; else empty.
        answers: Every answer of the run by request id: its kind, and against what each of its columns was compared.
        requests: Generations and scores that were requested so far.
        sent: How often each value of each sampling parameter was sent, by name.
        on_request: Called before each of them.
        gate: Held by each of them while it is in progress.
    """

    def __init__(self, inner: Backend, log: WireLog, read: ReadExchange | None) -> None:
        self.inner, self.name = inner, inner.name
        self.connect, self.tokenize, self.abort, self.aclose = inner.connect, inner.tokenize, inner.abort, inner.aclose
        if isinstance(inner, Watched):
            self.watch = inner.watch
        self.log, self.read, self.raw = log, read, list[WireGeneration]()
        self._known = WeakKeyDictionary[WireExchange, list[WireGeneration]]()
        self.answers: dict[str, Answered] = {}
        self.requests = 0
        self.sent: dict[str, Counter[str]] = {name: Counter() for name in SamplingParams.model_fields}
        self.on_request: Callable[[], None] = lambda: None
        self.gate: AbstractAsyncContextManager[Any] = nullcontext()

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """See `Backend.generate`."""
        self._count()
        sampling = request.sampling.model_dump(mode="json", exclude_defaults=True)
        set_place(sampling=sampling, streamed=on_chunk is not None, request_id=request.request_id)
        for name, value in sampling.items():
            self.sent[name][_shown(name, value)] += 1
        async with self.gate:
            raw = await (self.inner.generate(request) if on_chunk is None else self.inner.generate(request, on_chunk))
        self.answers[raw.request_id or request.request_id] = _answered(request, raw, streamed=on_chunk is not None)
        if self.read is None:
            self.raw.append(_generation(request, raw))
        return raw

    async def score(self, token_ids: TokenIds, *images: PromptImages, **adapter: Any) -> RawScores:
        """See `Backend.score`, and for images `ImageScorer`."""
        self._count()
        inner: Any = self.inner
        async with self.gate:
            scores: RawScores = await (inner.score_with_images if images else inner.score)(
                token_ids, *images, **adapter
            )
        return scores

    score_with_images = score

    def generations(self) -> list[WireGeneration]:
        """Return the generations since the last `clear`: from the wire if it can be read, else from the backend."""
        if self.read is None:
            return list(self.raw)
        for exchange in self.log.exchanges:
            if exchange.whole and exchange not in self._known:  # a conversation reads all of its answers each turn
                self._known[exchange] = generations(self.read, [exchange])
        return [each for exchange in self.log.exchanges for each in self._known.get(exchange, ())]

    def clear(self) -> None:
        """Drop what was sent and answered so far."""
        self.log.exchanges.clear()
        self.raw.clear()

    def compared(self, column: str, source: str, *request_ids: str | None) -> None:
        """Note against what a column of some answers was compared; a second source is more than a law."""
        for each in request_ids:
            columns = self.answers[each].columns if each in self.answers else {}
            if columns.get(column, NOTHING if column == "text" else None) in (NOTHING, "law"):
                columns[column] = source

    def _count(self) -> None:
        self.requests += 1
        self.on_request()


def _shown(name: str, value: Any) -> str:
    """Return a value as the table of the report has it; of grammars, stop ids and biases only their kind or number."""
    if name == "extra":
        return ", ".join(sorted(value))
    if name == "grammar":
        return str(value["kind"])
    return f"{len(value)} ids" if name == "stop_token_ids" else f"{value:g}" if isinstance(value, float) else str(value)


def _answered(request: TokenRequest, raw: RawResponse, *, streamed: bool) -> Answered:
    """Return an answer's kind, and for each column that it has the law that the client checks, or nothing."""
    sampling, outputs = request.sampling, request.optional_outputs
    moved = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.extra)
    kinds = {
        "aborted": raw.finish == "abort",
        "under a grammar": sampling.grammar is not None,
        "penalties, bias": moved or sampling.repetition_penalty != 1.0,
        "greedy": sampling.temperature == 0,
        "truncated": sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0,
        "temperature 1": sampling.temperature == 1.0,
    }
    kind = next((name for name, applies in kinds.items() if applies), "other temperatures")
    law = {
        "versions": any(version is not None for _, _, version in raw.versions),
        "cached": raw.cached_tokens is not None,
        "top": bool(outputs.top_logprobs),
        "prompt scores": outputs.prompt_logprobs,
        "experts": bool(outputs.routed_experts),
        "kept": outputs.sampling_mask,
    }
    return Answered(
        kind + ", streamed" * streamed,
        {
            "prompt": NOTHING if raw.echoed is None else "echo",
            "ids": NOTHING,
            "logprobs": "law",
            "end": "law",
            **{name: "law" for name, has in law.items() if has},
        },
    )


def _generation(request: TokenRequest, raw: RawResponse) -> WireGeneration:
    """Convert a raw response to what the oracle reads."""
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
