"""HTTP to an engine: one pooled client per event loop, typed errors, bounded retries, answers decoded."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import aiohttp
import msgspec

from tito_core.backend.errors import (
    UNREADABLE,
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
)
from tito_core.backend.http import address
from tito_core.backend.http.bodies import ERROR_BYTES, INFO_BYTES, AnswerSize, BodyTooLargeError, UndecodableBodyError
from tito_core.backend.http.connections import (
    Call,
    ConnectionPool,
    HttpTransport,
    LoopTransports,
    Reply,
    known_authorities,
)
from tito_core.backend.http.errors import error_from_failure, error_from_status, speaks_tls, wants_tls
from tito_core.backend.id_text import Pieces, in_pieces
from tito_core.backend.retries import Attempt, Retries, Sleep, may_pass
from tito_core.backend.typed_values import at_least, positive_seconds

T = TypeVar("T")
HttpTransportFactory = Callable[[], HttpTransport]
"""Makes what carries requests, in the event loop that it is for."""
_TLS_WITHIN_S = 1.0
"""Longest wait for a TLS handshake with a server that hung up on plain HTTP, in seconds."""
_INFO = AnswerSize(INFO_BYTES, INFO_BYTES)


class HttpRequest(msgspec.Struct, frozen=True):
    """What one try sends, and how much may come back.

    Attributes:
        path: After the server's address.
        body: In one piece, or one piece after the other.
        headers: Its own. Only printable ASCII is sent.
        size: Bounds on the answer. The default, 4 MiB, is too small for a generation: give it `answer_size`.
    """

    path: str
    body: bytes | Pieces = b""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    size: AnswerSize = _INFO


class HttpAnswer(msgspec.Struct, frozen=True):
    """The body of a 200, and what it says that it is."""

    body: bytes
    content_type: str


class EngineHttp:
    """Sends requests to one server. Stateless but for its connections; threads and event loops may share it.

    Args:
        backend: Name for errors.
        base_url: Such as "http://localhost:8000", or "unix:///run/vllm.sock" for a Unix socket.
        api_key: Sent as a bearer token; from the environment variable TITO_API_KEY when None. Never shown.
        timeout_s: Longest wait for a whole answer, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        max_connections: Most connections of one event loop, past which requests wait; 0 for any number.
        max_attempts: Tries for connection failures, 429, 503 and other 5xx; never for another 4xx.
        http_transport: Makes what carries the requests; aiohttp's `Pool` when None, as users have it.
        sleep: Waits between tries.
    """

    def __init__(
        self,
        backend: str,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        max_connections: int = 0,
        max_attempts: int = 4,
        http_transport: HttpTransportFactory | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.backend = backend
        where = address.Address.of(base_url, backend=backend)
        self.base_url = where.shown
        self._where = where
        self.timeout_s = positive_seconds("timeout_s", timeout_s)
        self.connect_timeout_s = min(positive_seconds("connect_timeout_s", connect_timeout_s), self.timeout_s)
        self._retries = Retries(max_attempts, sleep, self.may_retry)
        self._may_be_tls = where.root.startswith("http:") and where.socket is None and http_transport is None
        self._api_key = address.api_key(api_key, backend=backend)
        limit = at_least("max_connections", max_connections, 0)
        pool = functools.partial(ConnectionPool, where.socket, limit, self.connect_timeout_s)
        self._carriers = LoopTransports(http_transport or pool)

    @staticmethod
    def may_retry(error: BaseException) -> bool:
        """Return whether a request is sent again after an error; see `Retries`."""
        return may_pass(error)

    async def retrying(self, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """Do work, again while it fails in a way that may pass.

        Raises:
            BackendError: What the last try raised.
        """
        return await self._retries(work)

    async def send(self, request: HttpRequest, *, method: str = "POST") -> HttpAnswer:
        """Send one request with retries; give the 200."""
        return await self.retrying(lambda attempt: self.send_once(request, method=method))

    async def send_once(
        self, request: HttpRequest, *, method: str = "POST", request_id: str | None = None
    ) -> HttpAnswer:
        """Send one request without retries; give the 200, whole. The errors are those of `reading`."""

        async def whole(reply: Reply) -> HttpAnswer:
            return HttpAnswer(await reply.whole(request.size.body), reply.kind)

        return await self.reading(request, whole, method=method, request_id=request_id)

    async def reading(
        self,
        request: HttpRequest,
        read: Callable[[Reply], Awaitable[T]],
        *,
        method: str = "POST",
        request_id: str | None = None,
    ) -> T:
        """Send one request without retries, and read the body of its 200 in the time that is allowed for all of it.

        Raises:
            BackendError: The subclass tells what happened.
        """
        shown, headers, body = self.base_url + request.path, self._headers(request), in_pieces(request.body)
        carrier = self._carriers.held or await self._carriers.current()
        if not isinstance(body, bytes):
            headers["Content-Length"] = str(sum(map(len, body)))
        deadline = asyncio.timeout(self.timeout_s)  # of the whole answer: a slow drip never idles
        try:
            async with deadline:
                reply = await carrier.send(method, self._where.root + request.path, headers, body)
                self._may_be_tls = False
                try:
                    if reply.status == 200:
                        return await read(reply)
                    said = await reply.text(ERROR_BYTES)
                finally:
                    await reply.aclose()
        except BackendError as error:
            self._hidden(error)
            raise
        except (aiohttp.ClientError, OSError, BodyTooLargeError, UndecodableBodyError) as failure:
            if isinstance(failure, TimeoutError) and deadline.expired():
                raise self._late(shown, request_id) from None
            raise self._hidden(await self._failed(failure, shown, request_id)) from failure
        finally:
            del deadline  # which knows the task, whose error knows this frame
        headers = {name.lower(): self.hide_key(value) for name, value in reply.headers.items()}
        hidden = self.hide_key(said)  # before it is cut, which could leave half of a key
        raise error_from_status(self.backend, reply.status, hidden, headers, url=shown, request_id=request_id)

    def _late(self, shown: str, request_id: str | None) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"{self.backend} at {shown} did not answer within {self.timeout_s:g} s. The request was given up and "
            "the server told to abort it; raise timeout_s if answers take longer.",
            backend=self.backend,
            request_id=request_id,
        )

    async def _failed(self, failure: Exception, shown: str, request_id: str | None) -> BackendError:
        """Return the error for a request without a whole answer; of a server that never gave one, look for TLS."""
        error = error_from_failure(
            self.backend,
            failure,
            url=shown,
            connect_timeout_s=self.connect_timeout_s,
            request_id=request_id,
        )
        broke = isinstance(error, EngineConnectionError) and error.sent
        garbled = isinstance(failure, aiohttp.ClientResponseError)
        if (broke or garbled) and self._may_be_tls:
            self._may_be_tls = await speaks_tls(self._where.root, min(self.connect_timeout_s, _TLS_WITHIN_S))
            if self._may_be_tls:
                return wants_tls(self.backend, shown, request_id)
        return error

    def _headers(self, request: HttpRequest) -> dict[str, str]:
        for name, value in request.headers.items():
            if not (value.isascii() and value.isprintable()):
                raise BadRequestError(
                    f"The header {name} cannot be sent: {value!r} holds a character that is not printable ASCII. Was "
                    "it a session_id or a request_id? Give one without it.",
                    backend=self.backend,
                )
        headers = {"Content-Type": "application/json", **request.headers}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers

    def without_loop(self, request: HttpRequest) -> Call:
        """Return a POST as a call that needs no event loop, for the end of one."""
        where, body = self._where, request.body if isinstance(request.body, bytes) else b"".join(request.body)
        return Call(where.root, where.socket, request.path, body, self._headers(request), known_authorities)

    def hide_key(self, text: str) -> str:
        """Take the API key out of what a server said."""
        if not self._api_key:
            return text
        return re.sub(rf"(?<![\w-]){re.escape(self._api_key)}(?![\w-])", "<API key>", text)

    def _hidden(self, error: BackendError) -> BackendError:
        """Take the API key out of an error, whatever part of an answer holds it."""
        error.args = (self.hide_key(str(error)), *error.args[1:])
        error.body = self.hide_key(error.body)
        return error

    async def aclose(self) -> None:
        """Close the running loop's client. Loops that end close theirs by themselves."""
        await self._carriers.aclose()


def decoded(http: EngineHttp, raw: HttpAnswer, kind: type[T], request_id: str | None = None) -> T:
    """Decode JSON into a wire type, which skips what it does not name.

    Raises:
        ProtocolViolationError: Not JSON, or not of this shape.
    """
    try:
        if raw.body and raw.content_type and "json" not in raw.content_type:
            raise msgspec.DecodeError(f"its content type is {raw.content_type!r}")
        return msgspec.json.decode(raw.body, type=kind)
    except UNREADABLE as error:
        problem = f"but {error}" if raw.body else "but its body is empty"
        at = re.search(r"byte (\d+)", str(error))
        start = max(0, int(at[1]) - 40) if at else 0
        shown = http.hide_key(raw.body[start : start + 80].decode(errors="replace"))
        raise ProtocolViolationError(
            f"{http.backend} at {http.base_url} answered 200, {http.hide_key(problem)}: it says {shown!r}. "
            f"Is this a {http.backend} server, and no proxy's page?",
            backend=http.backend,
            status=200,
            body=http.hide_key(raw.body[:2000].decode(errors="replace")),
            request_id=request_id,
        ) from error
