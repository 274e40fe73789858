"""What every backend over HTTP shares: connecting once, running a generation that is aborted when lost, decoding."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from tito_core.backend.errors import (
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
)
from tito_core.backend.protocol import EngineInfo, TokenRequest, TokenResponse
from tito_core.backend.registry import installed_backends
from tito_core.backend.transport import Attempt, EngineHttp, HttpRequest, HttpTransportFactory

T = TypeVar("T")
ABORT_WITHIN_S = 5.0


class ServedModel(Protocol):
    """One entry of an OpenAI-style `/v1/models`, which both engines answer."""

    id: str
    owned_by: str | None


S = TypeVar("S", bound=ServedModel)


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """A decoded answer, how long it took, and the id under which the engine ran it."""

    value: T
    latency_s: float
    request_id: str


class HttpBackend(ABC):
    """Base of a backend over HTTP.

    Args:
        base_url: Such as "http://localhost:8000".
        model: Name of the model; the server's first one when None.
        api_key: See `EngineHttp`.
        timeout_s: Longest wait for an answer, in seconds.
        max_attempts: Tries for what is retried: connection failures, 429, 503 and other 5xx.
        http_transport: Makes the httpx transport; scripted engines put theirs here.
    """

    name: ClassVar[str]

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_attempts: int = 4,
        http_transport: HttpTransportFactory | None = None,
    ) -> None:
        self.http = EngineHttp(
            self.name,
            base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            max_attempts=max_attempts,
            http_transport=http_transport,
        )
        self._model = model
        self._info: EngineInfo | None = None

    async def connect(self) -> EngineInfo:
        """Ask the server what it is; later calls give the first answer."""
        if self._info is None:
            self._info = await self._discover()
        return self._info

    async def generate(self, request: TokenRequest) -> TokenResponse:
        """Sample one completion; see `Backend.generate`."""
        return await self._generate(await self.connect(), request)

    @abstractmethod
    async def _discover(self) -> EngineInfo: ...

    @abstractmethod
    async def _generate(self, info: EngineInfo, request: TokenRequest) -> TokenResponse: ...

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Stop a generation on the engine."""

    async def aclose(self) -> None:
        """Close this event loop's connections."""
        await self.http.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        """GET and decode."""
        return self.decode(await self.http.get(path), kind)

    async def post(self, path: str, body: object, kind: type[T]) -> T:
        """POST JSON and decode."""
        encoded = msgspec.json.encode(body)
        return self.decode(await self.http.send(lambda attempt: HttpRequest(path, encoded)), kind)

    async def exchange(self, request_id: str, prepare: Callable[[str], HttpRequest], kind: type[T]) -> Answer[T]:
        """Send a generation; whatever way it is lost, the engine is told to stop it before anything else happens.

        Args:
            request_id: Ours.
            prepare: Builds the request for one try from that try's own id.
            kind: Type of the answer.
        """
        running, started = request_id, time.perf_counter()

        def begin(attempt: Attempt) -> HttpRequest:
            nonlocal running, started
            running, started = attempt.name(request_id), time.perf_counter()
            return prepare(running)

        try:
            raw = await self.http.send(begin, request_id=request_id)
        except (asyncio.CancelledError, GeneratorExit, EngineTimeoutError, EngineConnectionError):
            await self._abort_quietly(running)
            raise
        return Answer(self.decode(raw, kind, request_id), time.perf_counter() - started, running)

    def decode(self, raw: bytes, kind: type[T], request_id: str | None = None) -> T:
        """Decode JSON into a wire type, which skips what it does not name.

        Raises:
            ProtocolViolationError: Not JSON, or not of this shape.
        """
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolViolationError(
                f"{self.name} at {self.http.base_url} answered 200, but not in a shape that {self.name} speaks ({error}); "
                f"the body starts with {raw[:80]!r}. Is this a {self.name} server, and no proxy's page?",
                backend=self.name,
                status=200,
                body=raw[:2000].decode(errors="replace"),
                request_id=request_id,
            ) from error

    def choose_model(self, models: list[S]) -> S:
        """Choose the model asked for among those served, and check that the server is of our kind."""
        if not models:
            raise BackendError(f"The {self.name} server serves no model.", backend=self.name)
        owner = models[0].owned_by
        if owner != self.name and owner in installed_backends():
            raise BadRequestError(
                f"The server at {self.http.base_url} says that it is {owner}, not {self.name}: use backend={owner!r}.",
                backend=self.name,
            )
        for model in models:
            if self._model in (None, model.id):
                return model
        raise BadRequestError(
            f"The {self.name} server at {self.http.base_url} does not serve {self._model!r}; it serves "
            f"{', '.join(repr(model.id) for model in models)}. Give one of these as model_id, or leave it out.",
            backend=self.name,
        )

    async def _abort_quietly(self, request_id: str) -> None:
        # The generation is already lost, and what lost it must reach the caller: a failing abort says nothing new.
        abort = asyncio.ensure_future(asyncio.wait_for(self.abort(request_id), ABORT_WITHIN_S))
        with contextlib.suppress(BackendError, TimeoutError, asyncio.CancelledError):
            await asyncio.shield(abort)
