"""Base class of backends over HTTP: queries at connect, generations with retries, and aborts of those that are lost."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar, Generic, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from tito_core.backend.errors import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    EngineTimeoutError,
    ServerError,
    WeightsNotLoadedError,
    hidden,
)
from tito_core.backend.http.client import EngineHttp, HttpRequest, HttpTransportFactory, decoded
from tito_core.backend.http.connection import CONNECT_TIMEOUT_S, Connection
from tito_core.backend.http.errors import NOT_OFFERED
from tito_core.backend.http.streaming import StreamAssembler, StreamReader
from tito_core.backend.http.watch import ServerWatch
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import EngineAdmin, EngineInfo, OnChunk, RawResponse, RawScores, Running, TokenRequest
from tito_core.backend.registry import installed_backends
from tito_core.backend.retries import ABORT_WITHIN_S, PATIENCE_S, TIMEOUT_S, Clock, Failures, Sleep
from tito_core.backend.values import at_least, short_repr
from tito_core.ledger.columns import TokenIds

_log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R", RawResponse, RawScores)
_LISTED_MODELS = 5
"""Names of served models that an error lists."""


class HttpBackend(ABC):
    """Base of a backend over HTTP. Subclasses implement `discover`, `generate`, `score` and `abort_request`, and
    `adapter_request` where the server loads adapters. `tito_vllm/backend.py` is a model: `generate` calls
    `checked_info` first, passes `probe=request.is_probe` to `send_generation`, and returns `counted(...)`.

    Args:
        base_url: Such as "http://localhost:8000", or "unix:///run/vllm.sock" for a Unix socket.
        model: Name of the model; the server's first one when None.
        api_key, admin_api_key, headers, timeout_s, connect_timeout_s, max_connections: See `Connection.to`.
        patience_s: How long a request waits for a server that is away or busy, in seconds; 0 for one try. An address
            at which no server has answered yet fails at once.
        data_parallel_size: Number of data-parallel ranks; None for what the server reports, or one.
        http_transport: Makes the transport; tests pass one of a scripted engine.
        sleep: Waits between tries.
        clock: Measures the patience.
    """

    name: ClassVar[str]

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        max_connections: int = 0,
        patience_s: float = PATIENCE_S,
        data_parallel_size: int | None = None,
        http_transport: HttpTransportFactory | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        connection = Connection.to(
            base_url,
            backend=self.name,
            api_key=api_key,
            admin_api_key=admin_api_key,
            headers=headers,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
            patience_s=patience_s,
        )
        self.http = EngineHttp(self.name, connection, http_transport=http_transport, sleep=sleep, clock=clock)
        self._model = model
        self._ranks = data_parallel_size
        if data_parallel_size is not None:
            at_least("data_parallel_size", data_parallel_size, 1, "a number of ranks, at least 1, or None")
        self._info: EngineInfo | None = None
        http = self.http  # not the backend: see `ServerWatch`
        self._tries: dict[str, str] = {}
        """The id of the try that runs now, by request id."""
        self._abort_tasks: set[asyncio.Task[None]] = set()
        self._adapter_names: set[str] = set()
        self._logged: set[tuple[type[Exception], int | None]] = set()
        self.watch = ServerWatch(lambda: http.interruptions)

    async def connect(self) -> EngineInfo:
        """Query the server's properties; later calls return the first result."""
        if self._info is None:
            self._info = await self.discover()
        return self._info

    async def checked_info(self) -> EngineInfo:
        """Return the server's properties before a generation, after a check that they still hold where one is due."""
        info = await self.connect()
        if self.watch.due:
            await self.watch.before(self, info, self.discover)
        return info

    async def counted(self, raw: R) -> R:
        """Return an answer or scores, after a check that the server is that of `connect` where one is due.

        Raises:
            ServerChangedError: See `ServerWatch.after`.
        """
        served_by = raw.served_by if isinstance(raw, RawResponse) else None
        await self.watch.after(self, await self.connect(), self.discover, served_by)
        return raw

    def rank_of(self, session_id: str) -> int:
        """Return the data-parallel rank of a session, the same for all its requests."""
        return crc32(session_id.encode()) % (self._ranks or 1)

    @abstractmethod
    async def discover(self) -> EngineInfo:
        """Query the server's properties, at connect and when it may have been replaced."""

    @abstractmethod
    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample one completion with `send_generation`; see `Backend.generate`."""

    @abstractmethod
    async def score(self, token_ids: TokenIds) -> RawScores:
        """Score a sequence teacher-forced; see `Backend.score`."""

    @classmethod
    def adapter_request(cls, name: str, path: str | None) -> HttpRequest:
        """Return the request that loads an adapter from a folder, or unloads it if `path` is None.

        Raises:
            BadRequestError: The server loads none, as by default.
        """
        raise BadRequestError(
            f"The backend {cls.name!r} cannot load or unload the adapter {short_repr(name)}. Name the adapters of its "
            "server when you start it, or implement `adapter_request`.",
            backend=cls.name,
        )

    async def load_adapter(self, name: str, path: str) -> None:
        """See `EngineAdmin.load_adapter`. Names are remembered per backend object; a server refuses those in use."""
        if name in self._adapter_names:
            raise BadRequestError(
                f"The adapter name {short_repr(name)} was used before on {self.name}, which may hold cached prompts of "
                f"the weights that it had. {short_repr(path)} was not loaded: give each version a new name.",
                backend=self.name,
            )
        await self.http.send(self.adapter_request(name, path))
        self._adapter_names.add(name)

    async def unload_adapter(self, name: str) -> None:
        """See `EngineAdmin.unload_adapter`."""
        self._adapter_names.add(name)
        await self.http.send(self.adapter_request(name, None))

    @staticmethod
    @abstractmethod
    def abort_request(request_id: str) -> HttpRequest:
        """Return the request that stops a generation."""

    async def tokenize(self, text: str) -> TokenIds | None:
        """Encode text with the server's tokenizer; see `Backend.tokenize`.

        None if the server has no such endpoint, denies access to it, or has no tokenizer (a 500 that says so).
        """
        info = await self.connect()
        body = msgspec.json.encode({"model": info.model, "prompt": text, "add_special_tokens": False})

        async def send(_: int) -> TokenIds | None:
            try:
                return np.array((await self._ask_once("/tokenize", Tokenized, body)).tokens, np.int32)
            except (AuthenticationError, BadRequestError, ServerError) as error:
                said = error.body.replace("/tokenize", "")  # gateways quote the path
                if isinstance(error, ServerError) and (error.status != 500 or "tokeniz" not in said):
                    raise
                error.with_traceback(None)
            return None

        return await self.http.retries(send, probe=True)

    async def abort(self, request_id: str) -> None:
        """Stop the try of a generation that runs on the engine; an unknown id does nothing.

        Where this is not offered, as behind some routers, a closed connection ends the generation, which that of a lost
        request is.
        """
        running = self.abort_request(self._tries.get(request_id, request_id))
        await self._if_offered(self.http.send_once(running))

    async def aclose(self) -> None:
        """Close this event loop's connections, after the aborts that use them."""
        loop = asyncio.get_running_loop()
        if aborts := [task for task in list(self._abort_tasks) if task.get_loop() is loop]:
            await asyncio.wait(aborts)
        await self.http.aclose()

    async def ask(self, path: str, kind: type[T], body: bytes | None = None) -> T:
        """GET a path, or POST a body to it, and decode the 200: a probe, which tells something of the server.

        One bad answer tells nothing: what is not a clear refusal is a fault, and the probe is sent again.

        Raises:
            AuthenticationError, BadRequestError: The server refused the probe.
            BackendError: A fault, in every try.
        """
        return await self.http.retries(lambda _: self._ask_once(path, kind, body), probe=True)

    async def _ask_once(self, path: str, kind: type[T], body: bytes | None) -> T:
        request, method = HttpRequest(path, body or b""), "GET" if body is None else "POST"
        return decoded(self.http, await self.http.send_once(request, method=method), kind)

    async def get_optional(self, path: str, kind: type[T]) -> T | None:
        """GET and decode a path that some versions of a server, or gateways before it, do not offer; None there.

        An answer without any field of `kind` is asked for once more: a gateway that starts up has one for a while, and
        a router may have its own for good.
        """
        found = await self._if_offered(self.ask(path, kind))
        return await self._if_offered(self.ask(path, kind)) if found == kind() else found

    async def _if_offered(self, answer: Awaitable[T]) -> T | None:
        try:
            return await answer
        except (AuthenticationError, BadRequestError) as error:
            if error.status not in NOT_OFFERED:
                raise
            error.with_traceback(None)
            return None

    async def refusal(self, path: str, body: bytes, kind: type[object]) -> AuthenticationError | BadRequestError | None:
        """POST a request that a server should refuse; return its error, or None for an answer of type `kind`.

        The error has no traceback, whose frames would keep the connections in a reference cycle.
        """
        try:
            await self.ask(path, kind, body)
        except (AuthenticationError, BadRequestError) as error:
            return error.with_traceback(None)
        return None

    async def send_generation(
        self,
        request_id: str,
        prepare: Callable[[str], HttpRequest],
        kind: type[T],
        *,
        assembler: Callable[[], StreamAssembler[T]] | None = None,
        on_chunk: OnChunk | None = None,
        prompt: IdText | None = None,
        probe: bool = False,
    ) -> DecodedResponse[T]:
        """Send a generation, with retries. A try that is lost is aborted on the engine before the next one.

        Args:
            request_id: Our request id.
            prepare: Builds the request for one try from that try's own id.
            kind: Type of the response.
            assembler: Makes the assembler of a streamed response.
            on_chunk: Called with each chunk of a stream; None for a response in one body.
            prompt: The prompt's text if its echo is requested: an equal echo is not decoded.
            probe: See `Failures`.
        """
        retries, failures = self.http.retries, Failures(probe)
        while True:
            # SGLang refuses an id that is still running, so each retry has its own.
            running = f"{request_id}-retry{failures.count}" if failures.count else request_id
            request, reader = prepare(running), None
            if assembler is not None and on_chunk is not None:
                url = self.http.base_url + request.path
                reader = StreamReader(assembler, on_chunk, self.name, url, request_id, request.size)
            self._tries[request_id] = running
            try:
                return await self._generate_once(running, request, kind, reader, prompt, request_id)
            except BackendError as error:
                error.was_streamed = reader is not None and reader.was_streamed
                if not retries.may_go_on(error, failures):
                    raise
            finally:
                self._tries.pop(request_id, None)
            await retries.sleep(failures.wait_s)

    async def _generate_once(
        self,
        running: str,
        request: HttpRequest,
        kind: type[T],
        reader: StreamReader[T] | None,
        prompt: IdText | None,
        request_id: str,
    ) -> DecodedResponse[T]:
        """Send one try, whose id is `running`; abort it if it is lost and may still run."""
        started = time.perf_counter()
        try:
            if reader is not None:
                value = await self.http.send_once(request, reader, request_id=request_id)
            else:
                raw = await self.http.send_once(request, request_id=request_id)
                if prompt is not None:
                    raw = prompt.without_echo(raw)
                value = decoded(self.http, raw, kind, request_id)
        except GeneratorExit:  # a closed coroutine cannot wait; its connection closes, and that ends the request
            raise
        except BaseException as lost:
            if _may_still_run(lost):
                await asyncio.shield(self._abort_quietly(running))  # a second cancellation is not delayed
            raise
        unordered = reader is not None and reader.unordered
        return DecodedResponse(value, time.perf_counter() - started, running, unordered)

    def _abort_quietly(self, running: str) -> asyncio.Task[None]:
        """Start an abort as a task of its own, so that it completes even if its caller is cancelled."""

        # Failures are only logged: the caller must see the error that lost the generation.
        async def stop() -> None:
            try:
                async with asyncio.timeout(ABORT_WITHIN_S):
                    await self.abort(running)
            except Exception as error:
                self._log_failed_abort(running, error)

        task = asyncio.create_task(stop())
        self._abort_tasks.add(task)
        task.add_done_callback(self._abort_tasks.discard)
        return task

    def _log_failed_abort(self, running: str, error: Exception) -> None:
        """Log the first failed abort of a kind: a server that refuses one refuses all."""
        kind = (type(error), getattr(error, "status", None))
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(
                "request %s could not be aborted, and may still run on the server: %s: %s (logged once)",
                running,
                type(error).__name__,
                " ".join(hidden(str(error)).split()) or f"no answer within {ABORT_WITHIN_S:g} s",
            )

    async def first_name(self) -> str | None:
        """Return the model's name from the server's start, where new weights give it another; None if unknown."""
        return None

    async def served_model(self) -> ServedModel:
        """Find the configured model among those served, and check that the server runs this engine."""
        models = (await self.ask("/v1/models", ServedModels)).data
        server = f"The {self.name} server at {self.http.base_url}"
        if not models:
            raise BadRequestError(f"{server} serves no model: start it with one.", backend=self.name)
        owner = models[0].owned_by
        if owner != self.name and owner in installed_backends():
            raise BadRequestError(
                f"The server at {self.http.base_url} runs {owner}, not {self.name}: use backend={owner!r}.",
                backend=self.name,
            )
        own = [model for model in models if not _is_adapter(model, models)]
        for model in own:
            if self._model in (None, model.id) or self._model == await self.first_name():
                return model
        self._refuse_adapter(self._model, models)
        names = ", ".join(short_repr(model.id) for model in own[:_LISTED_MODELS])
        if len(own) > _LISTED_MODELS:
            names = f"{names} and {len(own) - _LISTED_MODELS} more"
        raise BadRequestError(
            f"{server} does not serve {short_repr(self._model)}; it serves {names}. Pass one of these as model_id, or "
            "leave it out.",
            backend=self.name,
        )

    async def refuse_adapter(self, name: str) -> None:
        """Check a model's name that is not used for requests.

        Raises:
            BadRequestError: It is that of a LoRA adapter, which is a setting of rollouts.
        """
        self._refuse_adapter(name, (await self.ask("/v1/models", ServedModels)).data)

    def _refuse_adapter(self, name: str | None, models: list[ServedModel]) -> None:
        for model in models:
            if _is_adapter(model, models) and name in (None, model.id):
                raise BadRequestError(
                    f"{short_repr(model.id)} is a LoRA adapter on the {self.name} server at {self.http.base_url}. "
                    "Give the name of the base model, or none, and pass the adapter to each rollout: "
                    f"policy.model(adapter={model.id!r}).",
                    backend=self.name,
                )


class DecodedResponse(msgspec.Struct, Generic[T], frozen=True):
    """A decoded response, its latency in seconds, the id that was sent, and whether a stream did not show its order."""

    value: T
    latency_s: float
    request_id: str
    unordered: bool = False


class ServedModel(msgspec.Struct):
    """One entry of an OpenAI-style `/v1/models`. A LoRA adapter has a parent and, on both engines, no length."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None
    parent: str | None = None


class ServedModels(msgspec.Struct):
    """The response of `/v1/models` on both engines."""

    data: list[ServedModel]


class Tokenized(msgspec.Struct):
    """The response of `/tokenize` on both engines."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


def _is_adapter(model: ServedModel, models: list[ServedModel]) -> bool:
    """Return whether an entry is a LoRA adapter: it has a parent, or alone no length of its own."""
    return bool(model.parent) or (model.max_model_len is None and any(one.max_model_len is not None for one in models))


def _may_still_run(lost: BaseException) -> bool:
    """Return whether the engine may still be working on a request that failed with this error."""
    return not isinstance(lost, BackendError) or lost.sent or isinstance(lost, EngineTimeoutError)


@asynccontextmanager
async def changing_weights(server: EngineAdmin, path: str, version: str, running: Running) -> AsyncIterator[None]:
    """Pause a server while its weights are loaded; resume it on success. Arguments: see `load_weights`.

    Raises:
        WeightsNotLoadedError: Loading raised a `BackendError`; the server stays paused.
    """
    if not version:
        raise ValueError("version must be a non-empty name, such as 'step-17'.")
    await server.pause(running)
    try:
        yield
    except BackendError as error:
        raise WeightsNotLoadedError(
            f"{server.name} could not load the weights in {path!r} as {version!r} ({error}). It stays paused, as "
            "its weights may be incomplete. Load valid weights with load_weights, or call resume().",
            backend=server.name,
            status=error.status,
            body=error.body,
        ) from error
    await server.resume()
