"""What backends over HTTP share: one connection pool, aborts of lost generations, and the questions at connect."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar, TypeVar

import msgspec
import numpy as np

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    ProtocolViolationError,
    ServerError,
    WeightsNotLoadedError,
)
from tito_core.backend.http.connections import Reply
from tito_core.backend.http.in_flight import Answer, Exchanges
from tito_core.backend.http.streaming import Gathering
from tito_core.backend.http.transport import EngineHttp, HttpRequest, HttpTransportFactory, decoded
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import EngineAdmin, OnChunk, RawResponse, RawScores, Running, TokenRequest
from tito_core.backend.registry import installed_backends
from tito_core.backend.retries import Attempt, Sleep
from tito_core.backend.typed_values import shown
from tito_core.ledger.columns import TokenIds

T = TypeVar("T")
_LISTED_MODELS = 5
"""Names of served models that an error lists."""


class ServedModel(msgspec.Struct):
    """One entry of an OpenAI-style `/v1/models`. vLLM gives an adapter no length of its own."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class ServedModels(msgspec.Struct):
    """`/v1/models`, which both engines answer."""

    data: list[ServedModel]


class Tokenized(msgspec.Struct):
    """The answer of `/tokenize`, which both engines have."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class HttpBackend(ABC):
    """Base of a backend over HTTP, which adds `discover`, `generate`, `score` and `abort_request`.

    Args:
        base_url: Such as "http://localhost:8000", or "unix:///run/vllm.sock" for a Unix socket.
        model: Name of the model; the server's first one when None.
        api_key: See `EngineHttp`.
        timeout_s: Longest wait for an answer, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        max_connections: See `EngineHttp`.
        max_attempts: Tries for what is retried: connection failures, 429, 503 and other 5xx.
        http_transport: Makes what carries the requests; scripted engines put theirs here.
        sleep: Waits between tries.
    """

    name: ClassVar[str]
    http_type: ClassVar[type[EngineHttp]] = EngineHttp

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        max_connections: int = 0,
        max_attempts: int = 4,
        http_transport: HttpTransportFactory | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.http = self.http_type(
            self.name,
            base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
            max_attempts=max_attempts,
            http_transport=http_transport,
            sleep=sleep,
        )
        self._model = model
        self._info: EngineInfo | None = None
        self._exchanges = Exchanges(self.http, self.abort_request)

    async def connect(self) -> EngineInfo:
        """Ask the server what it is; later calls give the first answer."""
        if self._info is None:
            self._info = await self.discover()
        return self._info

    @abstractmethod
    async def discover(self) -> EngineInfo:
        """Ask the server what it is; called once."""

    @abstractmethod
    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample one completion, with `exchange`; see `Backend.generate`."""

    @abstractmethod
    async def score(self, token_ids: TokenIds) -> RawScores:
        """Score a sequence teacher-forced; see `Backend.score`."""

    @staticmethod
    @abstractmethod
    def abort_request(request_id: str) -> HttpRequest:
        """Return the request that stops a generation. Static, since the backend may be gone when it is sent."""

    async def tokenize(self, text: str) -> TokenIds | None:
        """Encode text with the server's tokenizer; see `Backend.tokenize`.

        A server that refuses has no such endpoint, or guards it; one that fails (500, 501) has no tokenizer.
        """
        info = await self.connect()
        body = {"model": info.model, "prompt": text, "add_special_tokens": False}
        request = HttpRequest("/tokenize", msgspec.json.encode(body))

        async def ask(attempt: Attempt) -> TokenIds | None:
            try:
                raw = await self.http.send_once(request)
                return np.array(decoded(self.http, raw, Tokenized).tokens, np.int32)
            except (AuthenticationError, BadRequestError, ProtocolViolationError) as error:
                error.with_traceback(None)
            except ServerError as error:
                if error.status not in (500, 501):
                    raise
                error.with_traceback(None)
            return None

        return await self.http.retrying(ask)

    async def abort(self, request_id: str) -> None:
        """Stop a generation on the engine; an unknown id does nothing."""
        await self.http.send_once(self.abort_request(request_id))

    async def aclose(self) -> None:
        """Close this event loop's connections."""
        await self.http.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        """GET and decode."""
        return decoded(self.http, await self.http.send(HttpRequest(path), method="GET"), kind)

    async def get_if_there(self, path: str, kind: type[T]) -> T | None:
        """GET and decode what not every version of a server tells; None where there is no such path."""
        try:
            return await self.get(path, kind)
        except BadRequestError as error:
            if error.status == 404:
                error.with_traceback(None)
                return None
            raise

    async def refusal(self, path: str, body: bytes) -> AuthenticationError | BadRequestError | None:
        """POST what a server should refuse, and give what it says; None when it does not refuse.

        The error comes without its traceback, whose frames hold the connections in a cycle of references.
        """
        try:
            await self.http.retrying(lambda _: self.http.reading(HttpRequest(path, body), _unread))
        except (AuthenticationError, BadRequestError) as error:
            return error.with_traceback(None)
        return None

    async def exchange(
        self,
        request_id: str,
        prepare: Callable[[str], HttpRequest],
        kind: type[T],
        *,
        gather: Callable[[], Gathering[T]] | None = None,
        on_chunk: OnChunk | None = None,
        prompt: IdText | None = None,
    ) -> Answer[T]:
        """Send a generation; see `Exchanges.run`."""
        return await self._exchanges.run(request_id, prepare, kind, gather, on_chunk, self.abort, prompt)

    async def served_model(self) -> ServedModel:
        """Choose the model asked for among those served, and check that the server is of our kind."""
        models = (await self.get("/v1/models", ServedModels)).data
        where = f"The {self.name} server at {self.http.base_url}"
        if not models:
            raise BadRequestError(f"{where} serves no model: start it with one.", backend=self.name)
        owner = models[0].owned_by
        if owner != self.name and owner in installed_backends():
            raise BadRequestError(
                f"The server at {self.http.base_url} says that it is {owner}, not {self.name}: use backend={owner!r}.",
                backend=self.name,
            )
        for model in models:
            if self._model in (None, model.id):
                length = next((m.max_model_len for m in (model, *models) if m.max_model_len is not None), None)
                return ServedModel(model.id, length, owner)
        names = ", ".join(shown(model.id) for model in models[:_LISTED_MODELS])
        if len(models) > _LISTED_MODELS:
            names = f"{names} and {len(models) - _LISTED_MODELS} more"
        raise BadRequestError(
            f"{where} does not serve {shown(self._model)}; it serves {names}. Give one of these as model_id, or leave "
            "it out.",
            backend=self.name,
        )


async def _unread(reply: Reply) -> None:
    """Leave an answer that should have been a refusal: it may be long, and says nothing that is needed."""


@asynccontextmanager
async def changing_weights(server: EngineAdmin, path: str, version: str, running: Running) -> AsyncIterator[None]:
    """Pause a server while its weights are loaded, and resume it unless that fails; arguments: see `load_weights`.

    Raises:
        WeightsNotLoadedError: Loading raised a `BackendError`; the server is left paused.
    """
    if not version:
        raise ValueError("version must be a name, such as 'step-17': without one nothing tells weights apart.")
    await server.pause(running)
    try:
        yield
    except BackendError as error:
        raise WeightsNotLoadedError(
            f"{server.name} could not load the weights in {path!r} as {version!r} ({error}). It is left paused, "
            "since it may hold half of them: load good ones with load_weights, which resumes it, or call resume().",
            backend=server.name,
            status=error.status,
            body=error.body,
        ) from error
    await server.resume()
