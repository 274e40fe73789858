"""The server under test: its backend, with a recorder of raw responses above and a log of its wire below."""

from __future__ import annotations

import base64
import functools
import inspect
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from tito_conformance.agents import TOOLS
from tito_conformance.checks import BrokenLawError, Tally, Where, refusing, set_place
from tito_conformance.oracle import compare_request
from tito_conformance.testing import find_wire, installed_wires
from tito_conformance.testing.wire import WireKit
from tito_conformance.wire import WireGeneration, generations
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BackendError, BadRequestError, ProtocolViolationError, ServerChangedError, hidden
from tito_core.backend.generate import generate
from tito_core.backend.http.client import ConnectionPool, HttpResponse, HttpTransport
from tito_core.backend.http.connection import Address
from tito_core.backend.id_text import SAME_ECHO, Pieces
from tito_core.backend.images import PromptImages, expanded
from tito_core.backend.protocol import (
    Backend,
    EngineAdmin,
    EngineInfo,
    ImageScorer,
    Integers,
    OnChunk,
    RawResponse,
    RawScores,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.registry import ENTRY_POINT_GROUP, create_backend
from tito_core.backend.sampling import SamplingParams
from tito_core.entry_points import load
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Adapter
from tito_core.model import Policy

AUTO = "auto"
UNKNOWN = "unknown"
NOT_TOKEN_EXACT = (
    "This was one of the first answers: if the server is another one than {} with an API of the same form, such as a "
    "plain OpenAI-compatible server, it lacks what token-exact rollouts need: ids, logprobs, the prompt as read, and "
    "the request's own name in each answer."
)
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, UNKNOWN: 0.05}
"""Largest allowed difference between a score and a reported logprob, in nats, by dtype."""
FINITE_TOP_K = 20
"""`top_k` on a server that refuses requests without a finite one."""


@dataclass(frozen=True)
class Target:
    """A server to test, and how.

    Attributes:
        backend: Name of the backend.
        base_url: The server's address.
        tokenizer: Name or folder of the model's tokenizer, or the object.
        parser: The tool-call format.
        transport: Makes the transport of the requests; aiohttp's when None. Scripted engines bring their own.
        options: Options of the backend, such as `model`, `api_key` and `timeout_s`.
        tolerance_nats: Largest allowed difference between a score and a reported logprob; None chooses it by the dtype.
        dtype: Dtype of the server's logits, a key of `TOLERANCES`, or "auto" to measure it.
        seed: Seed of everything that is drawn at random.
        seeds: Whether the server must obey a request's seed. SGLang does so only in its deterministic mode.
        experts: Layers and experts a token of a mixture-of-experts model, for a server that does not report them.
        weights: One or two folders that the server can read, whose weights it is made to load in turn; none leaves the
            server's weights alone.
        adapters: Names of LoRA adapters that the server has loaded, each with another effect.
    """

    backend: str
    base_url: str
    tokenizer: Any
    parser: str = "auto"
    transport: TransportFactory | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance_nats: float | None = None
    dtype: str = "auto"
    seed: int = 0
    seeds: bool = False
    experts: tuple[int, int] | None = None
    weights: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


async def connect(target: Target) -> ConnectedServer:
    """Connect to the server, and certify its chat template.

    Raises:
        BackendError, TemplateError, TokenizerError: As `Policy.connect` does.
    """
    log = WireLog(target.transport or _pool(target)) if _takes_transport(target.backend) else None
    options = dict(target.options)
    if log is not None:
        options["http_transport"] = log.transport
    recording = Recorder(create_backend(target.backend, target.base_url, **options))
    try:
        policy = await Policy.connect_async(backend=recording, tokenizer=target.tokenizer, parser=target.parser)
    except (ProtocolViolationError, BadRequestError) as error:
        error.advise(NOT_TOKEN_EXACT.format(target.backend))
        raise
    server = ConnectedServer(target, policy, recording, log)
    start = server.log_position()
    question: list[Any] = [{"role": "user", "content": [{"text": "Hi"}]}]
    prompt = policy.template.first_prompt(question, None, None).ids
    try:
        await generate(recording, TokenRequest(prompt, server.sampling(max_new_tokens=1), uuid.uuid4().hex))
    except BadRequestError:
        server.needs_top_k = True
    await _find_refused(server, prompt)
    limit = policy.info.max_model_len
    with_tools = policy.template.first_prompt(question, None, TOOLS).ids
    if limit is not None and len(with_tools) + LEAST_ROOM > limit:
        server.tools = []
    server.dtype = target.dtype if target.dtype != AUTO else await _measured_dtype(server, prompt)
    server.truncate_logs(start)
    return server


async def _find_refused(server: ConnectedServer, prompt: TokenIds) -> None:
    """Find which parameters of conversations the server refuses: all are sent at once, and alone if that is refused."""
    for names in (tuple(MOVED), *((name,) for name in MOVED)):
        sampling = server.sampling(max_new_tokens=1, **{name: MOVED[name] for name in names})
        try:
            await generate(server.recorder, TokenRequest(prompt, sampling, uuid.uuid4().hex))
            if len(names) > 1:
                return
        except BadRequestError as error:
            if len(names) == 1:
                server.refused |= set(names)
                server.tally.skip("requested", f"The server refuses {names[0]}: {str(error).partition(chr(10))[0]}")


MOVED = {"top_p": 0.913, "top_k": 50, "min_p": 0.013, "presence_penalty": 0.313, "seed": 1}
"""Parameters that conversations change, and that a server may refuse, as vLLM does `min_p` where it speculates."""


@dataclass(frozen=True)
class LogPosition:
    """A position in a server's logs: the number of exchanges on its wire and of raw responses."""

    exchanges: int
    recorded: int


@dataclass
class ConnectedServer:
    """A target with its policy.

    Attributes:
        target: The server.
        policy: The policy, which generates through the recorder.
        recorder: Records the backend's raw responses.
        log: The log of its wire; None if the backend takes no transport.
        live_version: The weight version that the suite loaded last; None before the first update.
        folder: The folder whose weights the suite loaded last; None before the first update.
        weight_updates: Number of weight updates so far.
        reports_versions: Whether answers report weight versions; False after one that did not.
        needs_top_k: Whether every request needs a temperature and a finite `top_k`, as with vLLM's
            `--return-sampling-mask`.
        refused: Sampling parameters that the server refuses; conversations leave them out.
        tools: Specs of the agents' tools.
        dtype: Dtype of the server's logits, as given or measured.
        tally: Counts the checks of the run.
    """

    target: Target
    policy: Policy
    recorder: Recorder
    log: WireLog | None
    tally: Tally = field(default_factory=Tally)
    live_version: str | None = None
    folder: str | None = None
    weight_updates: int = 0
    reports_versions: bool = True
    needs_top_k: bool = False
    refused: set[str] = field(default_factory=set)
    tools: list[Any] = field(default_factory=lambda: TOOLS)
    dtype: str = UNKNOWN
    _read: WeakKeyDictionary[Exchange, list[WireGeneration]] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def tolerance_nats(self) -> float:
        """Largest allowed difference between a score and a reported logprob, in nats."""
        given = self.target.tolerance_nats
        return TOLERANCES[self.dtype] if given is None else given

    @functools.cached_property
    def wire(self) -> WireKit[WireGeneration] | None:
        """The reader of the log; None if nothing is logged, or if no installed package reads the wire."""
        if self.log is None or self.target.backend not in installed_wires():
            return None
        return find_wire(self.target.backend)

    @property
    def backend(self) -> Backend:
        """The backend under test, without the recorder."""
        return self.recorder.inner

    def accepted(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return sampling parameters in a form that the server accepts."""
        if not self.needs_top_k:
            return dict(parameters)
        if parameters.get("temperature", 1.0) == 0:
            return {**parameters, "temperature": 1.0, "top_k": 1}
        return {**parameters, "top_k": parameters["top_k"] if parameters.get("top_k", -1) > 0 else FINITE_TOP_K}

    def sampling(self, **parameters: Any) -> SamplingParams:
        """Return sampling parameters that the server accepts, with the policy's stop ids."""
        return self.policy.sampling(SamplingParams(**self.accepted(parameters)))

    async def answer(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        on_chunk: OnChunk | None = None,
        streamed: bool = False,
        outputs: OptionalOutputs | None = None,
        images: PromptImages | None = None,
        request_id: str = "",
        adapter: Adapter | None = None,
    ) -> TokenResponse:
        """Sample a completion of a prompt, and compare request and answer with the wire.

        Args:
            prompt: Its ids, collapsed if it has images.
            sampling: All parameters.
            on_chunk: Receives the chunks of a stream.
            streamed: Whether to stream without it.
            outputs: Optional outputs.
            images: The prompt's images.
            request_id: A new one if empty.
            adapter: The LoRA adapter that samples.

        Raises:
            BackendError: See `tito_core.backend.generate`.
            BrokenLawError: The client refuses the answer, or the wire has another request or answer.
        """
        name, start = request_id or uuid.uuid4().hex, self.log_position()
        request = TokenRequest(
            prompt, sampling, name, optional_outputs=outputs or OptionalOutputs(), images=images, adapter=adapter
        )
        stream = on_chunk or ((lambda _: None) if streamed else None)
        with refusing():
            response = await generate(self.policy.backend, request, stream)
        got = (
            prompt.tolist(),
            sampling.model_dump(mode="json"),
            response.output_ids.tolist(),
            response.logprobs.tolist(),
        )
        where = Where(streamed=stream is not None, request_id=response.request_id)
        for each in self.generations(start):
            if each.request_id == response.request_id:
                for check, problem, *position in compare_request(*got, each):
                    self.tally.require(check, False, problem, where=replace(where, position=(*position, None)[0]))
                self.tally.require("requested", True, "")
        return response

    def log_position(self) -> LogPosition:
        """Return the current length of the logs."""
        return LogPosition(len(self.log.exchanges) if self.log is not None else 0, len(self.recorder.recorded))

    def generations(self, since: LogPosition) -> list[WireGeneration]:
        """Return the generations since a position: from the wire if it can be read, else from raw responses."""
        if self.wire is not None and self.log is not None:
            for exchange in self.log.exchanges[since.exchanges :]:
                if exchange.whole and exchange not in self._read:  # a conversation reads all of its answers each turn
                    self._read[exchange] = generations(self.wire.read, [exchange])
            found = (self._read.get(exchange, ()) for exchange in self.log.exchanges[since.exchanges :])
            return [generation for each in found for generation in each]
        return [_generation(*each) for each in self.recorder.recorded[since.recorded :]]

    def bodies(self, request_id: str | None) -> dict[str, Any]:
        """Return what was sent and answered in a request, as text without API keys; empty if it is not in the log."""
        if self.log is None or not request_id:
            return {}
        name = request_id.encode()
        found = [each for each in self.log.exchanges if name in each.sent or request_id in each.headers.values()]
        return {
            f"{each.method} {each.path}": {
                "status": each.status,
                "sent": hidden(each.sent.decode(errors="replace"))[:MOST_BODY],
                "got": hidden(each.got.decode(errors="replace"))[:MOST_BODY],
            }
            for each in found
        }

    async def expect_same_weights(self, broken: BrokenLawError) -> None:
        """Raise ServerChangedError if another client loaded weights since the connection, which explains a finding."""
        before = self.policy.info.weight_version
        if self.target.weights or before is None or not isinstance(self.backend, EngineAdmin):
            return
        try:
            now = await self.backend.weight_version()
        except BackendError:  # the finding stays
            return
        if now not in (before, None):
            raise ServerChangedError(
                f"Another client changed the server's weights during the run, from {before!r} to {now!r}, so scores "
                f"and equal requests differ. Run again while they stay. What this broke: {broken}",
                backend=self.target.backend,
            )

    def truncate_logs(self, since: LogPosition) -> None:
        """Drop everything that was logged since a position."""
        if self.log is not None:
            del self.log.exchanges[since.exchanges :]
        del self.recorder.recorded[since.recorded :]


def can_stream(backend: Backend) -> bool:
    """Return whether a backend can stream."""
    return "on_chunk" in inspect.signature(backend.generate).parameters


MOST_BODY = 100_000
"""Characters of a body that a report holds."""
LEAST_ROOM = 64
"""Tokens that the agents' tools must leave for a conversation; in a smaller context they have none."""


def _takes_transport(backend: str) -> bool:
    factory = load(ENTRY_POINT_GROUP, backend)
    return factory is not None and "http_transport" in inspect.signature(factory).parameters


def _pool(target: Target) -> TransportFactory:
    """Return a factory of the pool that the backend would have made itself; the log sits above it."""
    where = Address.of(target.base_url, backend=target.backend)
    options = target.options
    limit, connect_timeout_s = options.get("max_connections", 0), options.get("connect_timeout_s", 5.0)
    return functools.partial(ConnectionPool, where.socket, limit, connect_timeout_s)


TransportFactory = Callable[[], HttpTransport]


@dataclass(eq=False)
class Exchange:
    """One HTTP request, and as much of its response as arrived.

    Attributes:
        method: Of the request.
        path: Of its URL, without the query.
        headers: Of the request, names in lower case, without the API key.
        sent: The request's body.
        status: The response's status; None if no response arrived.
        got: The response's body, as far as it was read.
        whole: Whether the response arrived completely.
    """

    method: str
    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None = None
    got: bytearray = field(default_factory=bytearray)
    whole: bool = False


class WireLog:
    """The exchanges of one run, in the order in which they started.

    Args:
        inner: Makes the transport of the requests; aiohttp's pool by default, as users have it.

    Attributes:
        exchanges: Those of the checks that are in progress.
        failed: How many requests of the whole run got no answer or one that a client retries, by what came instead.
    """

    def __init__(self, inner: TransportFactory = ConnectionPool) -> None:
        self.exchanges: list[Exchange] = []
        self.failed: Counter[str] = Counter()
        self._inner = inner

    def transport(self) -> HttpTransport:
        """Return a transport that logs its exchanges: the `http_transport` of a backend."""
        return _LoggingTransport(self._inner(), self)


class _LoggingTransport:
    def __init__(self, inner: HttpTransport, log: WireLog) -> None:
        self._inner = inner
        self._log = log

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        logged = {name.lower(): value for name, value in headers.items() if name.lower() != "authorization"}
        sent = body if isinstance(body, bytes) else b"".join(body)
        exchange = Exchange(method, urlsplit(url).path, logged, sent)
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


async def _logged(raw: AsyncIterator[bytes], exchange: Exchange) -> AsyncIterator[bytes]:
    async for piece in raw:
        exchange.got += piece
        yield piece
    exchange.whole = True


Recorded = tuple[TokenRequest, RawResponse]
"""A request of the core, and the backend's raw response."""


class Recorder:
    """A backend that forwards everything to another one, and records its generations.

    Attributes:
        inner: The backend under test.
        recorded: Its generations, in the order of the responses.
        requests: Generations and scores that were requested so far.
        sent: How often each value of each sampling parameter was sent, by name.
        on_request: Called before each of them.
        gate: Held by each of them while it is in progress.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.recorded: list[Recorded] = []
        self.requests = 0
        self.sent: dict[str, Counter[str]] = {name: Counter() for name in SamplingParams.model_fields}
        self.on_request: Callable[[], None] = lambda: None
        self.gate: AbstractAsyncContextManager[Any] = nullcontext()

    async def connect(self) -> EngineInfo:
        """See `Backend.connect`."""
        return await self.inner.connect()

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """See `Backend.generate`."""
        self._count()
        sampling = request.sampling.model_dump(mode="json", exclude_defaults=True)
        set_place(sampling=sampling, streamed=on_chunk is not None, request_id=request.request_id)
        for name, value in sampling.items():
            self.sent[name][_shown(name, value)] += 1
        async with self.gate:
            raw = await (self.inner.generate(request) if on_chunk is None else self.inner.generate(request, on_chunk))
        self.recorded.append((request, raw))
        return raw

    async def score(self, token_ids: TokenIds, **adapter: Any) -> RawScores:
        """See `Backend.score`."""
        self._count()
        async with self.gate:
            return await self.inner.score(token_ids, **adapter)

    async def score_with_images(self, token_ids: TokenIds, images: PromptImages, **adapter: Any) -> RawScores:
        """See `ImageScorer`; only for a backend that is one."""
        self._count()
        async with self.gate:
            return await cast(ImageScorer, self.inner).score_with_images(token_ids, images, **adapter)

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


def _shown(name: str, value: Any) -> str:
    """Return a value as the table of the report has it; of grammars, stop ids and biases only their kind or number."""
    if name == "extra":
        return ", ".join(sorted(value))
    if name == "grammar":
        return str(value["kind"])
    return f"{len(value)} ids" if name == "stop_token_ids" else f"{value:g}" if isinstance(value, float) else str(value)


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


TOP = 20
LEAST_TOP = 4
TOKENS = 8
"""Tokens whose likeliest alternatives show the grid."""
GRIDS = {"bfloat16": 2.0**-6, "float16": 2.0**-10}
"""Smallest step between logits of usual size, 4 to 32, in nats."""
OFF_GRID = 2e-5
"""How far from the grid a difference may be: float32 rounds the logprobs themselves."""
LEAST_ON_GRID = 0.95
LEAST_DIFFERENCES = 20
"""With fewer differences other than 0, the dtype is unknown."""


async def _measured_dtype(server: ConnectedServer, prompt: TokenIds) -> str:
    limit = server.policy.info.capabilities.top_logprobs
    k = TOP if limit is None else min(TOP, limit)
    if k < LEAST_TOP or server.needs_top_k:
        return UNKNOWN
    sampling, outputs = (
        server.sampling(max_new_tokens=TOKENS, temperature=1.0),
        OptionalOutputs(top_logprobs=k),
    )
    request = TokenRequest(prompt, sampling, uuid.uuid4().hex, optional_outputs=outputs)
    try:
        response = await generate(server.recorder, request)
    except BackendError:  # the checks report it
        return UNKNOWN
    return dtype_of(response.columns["top_logprobs"].values)


def dtype_of(top_logprobs: NDArray[Any]) -> str:
    """Return the dtype of a server's logits, which no API reports, as logprobs of the likeliest tokens show it.

    Logits in 16 bits lie on a coarse grid, and so do the differences of two tokens' logprobs at temperature 1.

    Args:
        top_logprobs: At temperature 1, shape (n, k), NaN where there are fewer.
    """
    rows = np.asarray(top_logprobs, np.float64)
    apart = (rows - np.nanmax(rows, axis=1, keepdims=True))[np.isfinite(rows)] if rows.size else np.zeros(0)
    apart = apart[apart < -OFF_GRID]
    if len(apart) < LEAST_DIFFERENCES:
        return UNKNOWN
    for name, step in GRIDS.items():
        off = np.abs(apart / step - np.rint(apart / step)) * step
        if np.mean(off < OFF_GRID) >= LEAST_ON_GRID:
            return name
    return "float32"
