"""HTTP to an engine: one transport per event loop, typed errors, bounded retries, decoded responses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

import aiohttp
import msgspec

from tito_core.backend.errors import (
    UNREADABLE,
    BackendError,
    BadRequestError,
    ConnectionFailure,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
    hidden,
    hide_causes,
)
from tito_core.backend.http import address
from tito_core.backend.http.bodies import ERROR_BYTES, INFO_BYTES, AnswerSize, BodyTooLargeError, UndecodableBodyError
from tito_core.backend.http.connections import (
    BlockingPost,
    ConnectionPool,
    HttpResponse,
    HttpTransport,
    LoopTransports,
    known_authorities,
)
from tito_core.backend.http.errors import error_from_failure, error_from_status, speaks_tls, wants_tls
from tito_core.backend.id_text import Pieces, in_pieces
from tito_core.backend.retries import PATIENCE_S, TIMEOUT_S, Attempt, Clock, Retries, Sleep
from tito_core.backend.typed_values import at_least, positive_seconds

T = TypeVar("T")
HttpTransportFactory = Callable[[], HttpTransport]
"""Makes a transport in the event loop that uses it."""
_AROUND = 4096
"""Bytes around a part of a body that is shown, in which the API key is hidden first: half of one would not be found."""
_TLS_WITHIN_S = 1.0
"""Longest TLS handshake with a server that closed a plain HTTP connection, in seconds."""
_INFO = AnswerSize(INFO_BYTES, INFO_BYTES)
IDLE_S = 15.0
"""Seconds without any request after which the server may have been restarted: an engine takes longer to start."""
_INTERRUPTIONS: frozenset[ConnectionFailure] = frozenset({"refused", "reset", "closed"})


class HttpRequest(msgspec.Struct, frozen=True):
    """One request, and the size limits of its response.

    Attributes:
        path: Path, appended to the server's address.
        body: In one piece or several.
        headers: Additional headers; values must be printable ASCII.
        size: Size limits. The default, 4 MiB, is too small for a generation: use `answer_size`.
        admin: Whether it needs the key for administration, where the server has one.
    """

    path: str
    body: bytes | Pieces = b""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    size: AnswerSize = _INFO
    admin: bool = False


class ResponseBody(msgspec.Struct, frozen=True):
    """The body of a 200, and its content type."""

    body: bytes
    content_type: str


class EngineHttp:
    """Sends requests to one server. Its only state are connections; threads and event loops may share it.

    Attributes:
        interruptions: How often the server may have become another one: connections that were refused, reset or closed
            early, and times of `IDLE_S` without a request.

    Args:
        backend: Name for errors.
        base_url: Such as "http://localhost:8000", or "unix:///run/vllm.sock" for a Unix socket.
        api_key: Sent as a bearer token; from the environment variable TITO_API_KEY when None. Never shown.
        admin_api_key: Sent instead with aborts, pauses and new weights; `api_key` when None. Never shown.
        headers: Sent with every request, such as {"X-API-Key": "..."} for a gateway. Values are never shown.
        timeout_s: Longest wait for a whole response, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        max_connections: Maximum number of connections per event loop; further requests wait. 0 for no limit.
        patience_s: How long a request waits for a server that is away or busy, in seconds; see `Retries`.
        http_transport: Makes the transport; `ConnectionPool` when None.
        sleep: Waits between tries.
        clock: Measures the patience.

    Attributes:
        retries: Retries requests.
    """

    def __init__(
        self,
        backend: str,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = 5.0,
        max_connections: int = 0,
        patience_s: float = PATIENCE_S,
        http_transport: HttpTransportFactory | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self.backend = backend
        self.interruptions = 0
        where = address.Address.of(base_url, backend=backend)
        self.base_url = where.shown
        self._where = where
        self.timeout_s = positive_seconds("timeout_s", timeout_s)
        self.connect_timeout_s = min(positive_seconds("connect_timeout_s", connect_timeout_s), self.timeout_s)
        self.retries = Retries(patience_s, pause_s=self.timeout_s, sleep=sleep, clock=clock)
        self._clock = clock
        self._open: set[object] = set()
        self._last_s: float | None = None
        self._was_reached = False
        self._may_be_tls = where.root.startswith("http:") and where.socket is None and http_transport is None
        self._api_key = address.api_key(api_key, backend=backend)
        self._admin_api_key = address.api_key(admin_api_key, backend=backend) if admin_api_key else self._api_key
        self._more_headers = address.more_headers(headers, backend=backend)
        limit = at_least("max_connections", max_connections, 0)
        pool = functools.partial(ConnectionPool, where.socket, limit, self.connect_timeout_s)
        self._transports = LoopTransports(http_transport or pool)

    async def retrying(self, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """Call `work`, and retry transient failures.

        Raises:
            BackendError: The error of the last try.
        """
        return await self.retries(work)

    async def send(self, request: HttpRequest, *, method: str = "POST") -> ResponseBody:
        """Send one request with retries; return the 200."""
        return await self.retrying(lambda attempt: self.send_once(request, method=method))

    async def send_once(
        self, request: HttpRequest, *, method: str = "POST", request_id: str | None = None
    ) -> ResponseBody:
        """Send one request without retries; return the 200. Errors: see `reading`."""

        async def read(response: HttpResponse) -> ResponseBody:
            return ResponseBody(await response.read(request.size.body), response.kind)

        return await self.reading(request, read, method=method, request_id=request_id)

    async def reading(
        self,
        request: HttpRequest,
        read: Callable[[HttpResponse], Awaitable[T]],
        *,
        method: str = "POST",
        request_id: str | None = None,
    ) -> T:
        """Send one request without retries, and read the body of its 200 with `read`, all within `timeout_s`.

        Raises:
            BackendError: Its subclass says what failed.
        """
        with self._in_use():
            return await self._reading(request, read, method, request_id)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Count a time without requests as an interruption: a server that was restarted in it shows nothing of that."""
        if not self._open and self._last_s is not None and self._clock() - self._last_s > IDLE_S:
            self.interruptions += 1
        mark = object()
        self._open.add(mark)
        try:
            yield
        finally:
            self._open.discard(mark)
            self._last_s = self._clock()

    async def _reading(
        self, request: HttpRequest, read: Callable[[HttpResponse], Awaitable[T]], method: str, request_id: str | None
    ) -> T:
        shown, headers, body = self.base_url + request.path, self._headers(request), in_pieces(request.body)
        transport = self._transports.held or await self._transports.current()
        if not isinstance(body, bytes):
            headers["Content-Length"] = str(sum(map(len, body)))
        deadline = asyncio.timeout(self.timeout_s)  # for the whole response, which may arrive slowly but never idle
        try:
            async with deadline:
                response = await transport.send(method, self._where.root + request.path, headers, body)
                self._may_be_tls, self._was_reached = False, True
                try:
                    if response.status == 200:
                        return await read(response)
                    text = await response.text(ERROR_BYTES)
                finally:
                    await response.aclose()
        except BackendError as error:
            hide_causes(self._noted(error))
            raise
        except (aiohttp.ClientError, OSError, BodyTooLargeError, UndecodableBodyError) as failure:
            if isinstance(failure, TimeoutError) and deadline.expired():
                raise self._timed_out(shown, request_id) from None
            failed = self._noted(await self._failed(failure, shown, request_id))
            failed.__cause__ = failure
        else:
            failed = error_from_status(
                self.backend,
                response.status,
                text,
                response.headers,
                url=shown,
                request_id=request_id,
                admin=request.admin,
            )
        finally:
            del deadline  # it refers to the task, whose error refers to this frame
        try:
            raise hide_causes(failed)  # here, as a failure of aiohttp would be its context, with the request's headers
        finally:
            del failed

    def _noted(self, error: BackendError) -> BackendError:
        """Count an error after which the server may be another one."""
        if isinstance(error, EngineConnectionError) and error.reason in _INTERRUPTIONS:
            self.interruptions += 1
        return error

    def _timed_out(self, shown: str, request_id: str | None) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"{self.backend} at {shown} did not answer within {self.timeout_s:g} s. The request was aborted. Raise "
            "timeout_s if answers take longer.",
            backend=self.backend,
            request_id=request_id,
        )

    async def _failed(self, failure: Exception, shown: str, request_id: str | None) -> BackendError:
        """Return the error for a request without a whole response; before the first response, check for TLS."""
        error = error_from_failure(
            self.backend,
            failure,
            url=shown,
            connect_timeout_s=self.connect_timeout_s,
            request_id=request_id,
        )
        if isinstance(error, EngineConnectionError):
            error.reached = self._was_reached
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
                    f"The header {name} cannot be sent: {value!r} contains a character that is not printable ASCII. "
                    "Change the session_id or request_id.",
                    backend=self.backend,
                )
        headers = {"Content-Type": "application/json", **self._more_headers, **request.headers}
        if key := self._admin_api_key if request.admin else self._api_key:
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def blocking_post(self, request: HttpRequest) -> BlockingPost:
        """Return a POST that needs no event loop, for the end of a loop or process."""
        where, body = self._where, request.body if isinstance(request.body, bytes) else b"".join(request.body)
        return BlockingPost(where.root, where.socket, request.path, body, self._headers(request), known_authorities)

    async def aclose(self) -> None:
        """Close the running loop's transport. A loop that shuts down closes its own."""
        await self._transports.aclose()


def decoded(http: EngineHttp, raw: ResponseBody, kind: type[T], request_id: str | None = None) -> T:
    """Decode JSON into a wire type; unknown fields are ignored.

    Raises:
        ProtocolViolationError: Not JSON, or another shape.
    """
    try:
        if raw.body and raw.content_type and "json" not in raw.content_type:
            raise msgspec.DecodeError(f"its content type is {raw.content_type!r}")
        return msgspec.json.decode(raw.body, type=kind)
    except UNREADABLE as error:
        refused = _undecodable(http, raw, error, request_id)
    try:
        raise refused  # here, as `error`, which may quote the API key, would be its context
    finally:
        del refused


def _undecodable(http: EngineHttp, raw: ResponseBody, error: Exception, request_id: str | None) -> BackendError:
    problem = f"but {error}" if raw.body else "but its body is empty"
    at = re.search(r"byte (\d+)", str(error))
    start = max(0, int(at[1]) - 40) if at else 0
    before = raw.body[max(0, start - _AROUND) : start].decode(errors="replace")
    shown = hidden(raw.body[max(0, start - _AROUND) : start + 80 + 2 * _AROUND].decode(errors="replace"))
    refused = ProtocolViolationError(
        f"{http.backend} at {http.base_url} answered 200, {problem}: {shown[len(before) :][:80]!r}. "
        f"Check that this is a {http.backend} server and not a proxy.",
        backend=http.backend,
        status=200,
        body=raw.body[:ERROR_BYTES].decode(errors="replace"),
        request_id=request_id,
    )
    refused.__cause__ = error
    return hide_causes(refused)
