"""HTTP to an engine: one pool of connections per event loop, typed errors, retries, decoded responses.

What leans on inner parts of aiohttp, and the test that notices a change:

- `ClientSession._retry_connection`, so that a GET is not sent twice:
  `tests/backend/test_connections.py::test_a_connection_that_breaks_in_mid_answer`.
- The chain of causes of its errors and the text "ConnectionReset", from which `error_from_failure` reads the reason:
  the same file's tests of refused, unreachable, never opened, reset and unknown hosts.
- A loop that shuts down closes suspended async generators before its sockets (`LoopTransports`):
  `tests/backend/test_transport.py::test_connections_are_closed_when_each_loop_ends`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import socket
import ssl
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, overload

import aiohttp
import certifi
import msgspec

from tito_core.backend.errors import (
    UNREADABLE,
    BackendError,
    BadRequestError,
    ConnectionFailure,
    DamagedAnswerError,
    EngineConnectionError,
    EngineTimeoutError,
    hidden,
    hide_causes,
)
from tito_core.backend.http.body import (
    ERROR_BYTES,
    INFO_BYTES,
    AnswerSize,
    BodyTooLargeError,
    UndecodableBodyError,
    decompressed,
    read_start,
    read_whole,
)
from tito_core.backend.http.connection import Connection
from tito_core.backend.http.errors import GATEWAY_FAILURES, error_from_failure, error_from_status, with_scheme
from tito_core.backend.id_text import Pieces, in_pieces
from tito_core.backend.retries import Clock, Retries, Sleep

T = TypeVar("T")
_AROUND = 4096
"""Bytes around a part of a body that is shown, in which the API key is hidden first: half of one would not be found."""
_INFO = AnswerSize(INFO_BYTES, INFO_BYTES)
IDLE_S = 15.0
"""Seconds without any request after which the server may have been restarted: an engine takes longer to start."""
_INTERRUPTIONS: frozenset[ConnectionFailure] = frozenset({"refused", "reset", "closed"})
KEEP_ALIVE_S = 3.0
"""Seconds that an idle connection is kept. Both engines close idle connections after 5 s."""
_LONGEST_HEADER = 1 << 16
"""Longest header of an answer, in bytes. Gateways send longer ones than aiohttp's 8190."""
_DEFAULT_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}
"""Compression costs client and server more time than it saves."""


class HttpRequest(msgspec.Struct, frozen=True):
    """One request, and the size limits of its response.

    Attributes:
        path: Path, appended to the server's address.
        body: In one piece or several.
        headers: Additional headers; values must be printable ASCII.
        size: Size limits. The default, 4 MiB, is too small for a generation: use `answer_size`.
        admin: Whether it needs the key for administration, where the server has one.
        needs: What the server must be started with, or it answers 404. For the error.
    """

    path: str
    body: bytes | Pieces = b""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    size: AnswerSize = _INFO
    admin: bool = False
    needs: str = ""


class EngineHttp:
    """Sends requests to one server. Its only state are connections; threads and event loops may share it.

    Args:
        backend: Name for errors.
        connection: How to reach the server.
        http_transport: Makes the transport; `ConnectionPool` when None.
        sleep: Waits between tries.
        clock: Measures the patience.

    Attributes:
        interruptions: How often the server may have become another one: connections that were refused, reset or closed
            early, also a gateway's, and times of `IDLE_S` without a request.
        base_url: The server's address for errors.
        retries: Retries requests.
    """

    def __init__(
        self,
        backend: str,
        connection: Connection,
        *,
        http_transport: HttpTransportFactory | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self.backend = backend
        self.connection = connection
        self.base_url = connection.address.shown
        self.interruptions = 0
        self.retries = Retries(connection.patience_s, pause_s=connection.timeout_s, sleep=sleep, clock=clock)
        self._clock = clock
        self._open: set[object] = set()
        self._last_s: float | None = None
        self._was_reached = False
        pool = functools.partial(
            ConnectionPool, connection.address.socket, connection.max_connections, connection.connect_timeout_s
        )
        self._transports = LoopTransports(http_transport or pool)

    async def send(self, request: HttpRequest, *, method: str = "POST") -> bytes:
        """Send one request with retries; return the body of the 200."""
        return await self.retries(lambda _: self.send_once(request, method=method))

    @overload
    async def send_once(
        self, request: HttpRequest, *, method: str = "POST", request_id: str | None = None
    ) -> bytes: ...

    @overload
    async def send_once(
        self,
        request: HttpRequest,
        read: Callable[[HttpResponse], Awaitable[T]],
        *,
        method: str = "POST",
        request_id: str | None = None,
    ) -> T: ...

    async def send_once(
        self,
        request: HttpRequest,
        read: Callable[[HttpResponse], Awaitable[Any]] | None = None,
        *,
        method: str = "POST",
        request_id: str | None = None,
    ) -> Any:
        """Send one request without retries, and read its 200 with `read`, or its whole body, within `timeout_s`.

        Raises:
            BackendError: Its subclass says what failed.
        """
        shown, headers, body = self.base_url + request.path, self._headers(request), in_pieces(request.body)
        transport = self._transports.held or await self._transports.current()
        if not isinstance(body, bytes):
            headers["Content-Length"] = str(sum(map(len, body)))
        # For the whole response, which may arrive slowly but never idle.
        deadline, mark = asyncio.timeout(self.connection.timeout_s), self._begun()
        try:
            async with deadline:
                response = await transport.send(method, self.connection.address.root + request.path, headers, body)
                self._was_reached = True
                try:
                    if response.status == 200 and read is not None:
                        return await read(response)
                    if response.status == 200:
                        return await response.read(request.size.body)
                    text = await response.text(ERROR_BYTES)
                finally:
                    await response.aclose()
        except BackendError as error:
            hide_causes(self._noted(error))
            raise
        except (aiohttp.ClientError, OSError, BodyTooLargeError, UndecodableBodyError) as failure:
            if isinstance(failure, TimeoutError) and deadline.expired():
                raise self._timed_out(shown, request_id) from None
            failed = self._noted(self._failed(failure, shown, request_id))
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
                needs=request.needs,
            )
            self._noted(failed)
        finally:
            self._ended(mark)
            del deadline  # it refers to the task, whose error refers to this frame
        try:
            raise hide_causes(failed)  # here, as a failure of aiohttp would be its context, with the request's headers
        finally:
            del failed

    def _begun(self) -> object:
        """Count a time without requests as an interruption: a server that was restarted in it shows nothing of that.

        Returns the mark of a request that began now, for `_ended`.
        """
        if not self._open and self._last_s is not None and self._clock() - self._last_s > IDLE_S:
            self.interruptions += 1
        mark = object()
        self._open.add(mark)
        return mark

    def _ended(self, mark: object) -> None:
        self._open.discard(mark)
        self._last_s = self._clock()

    def _noted(self, error: BackendError) -> BackendError:
        """Count an error after which the server may be another one: a lost connection, ours or that of a gateway.

        HAProxy and Envoy answer 503 for a server that is away, with a page; an engine's own 503 is JSON.
        """
        lost = isinstance(error, EngineConnectionError) and error.reason in _INTERRUPTIONS
        page = error.status == 503 and not error.body.lstrip().startswith("{")
        self.interruptions += lost or page or error.status in GATEWAY_FAILURES
        return error

    def _timed_out(self, shown: str, request_id: str | None) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"{self.backend} at {shown} did not answer within {self.connection.timeout_s:g} s. The request was "
            "aborted. Raise timeout_s if answers take longer.",
            backend=self.backend,
            request_id=request_id,
        )

    def _failed(self, failure: Exception, shown: str, request_id: str | None) -> BackendError:
        """Return the error for a request without a whole response."""
        error = error_from_failure(
            self.backend,
            failure,
            url=shown,
            connect_timeout_s=self.connection.connect_timeout_s,
            request_id=request_id,
        )
        if isinstance(error, EngineConnectionError):
            error.reached = self._was_reached
        answered_nothing = error.sent or isinstance(error, DamagedAnswerError)
        if answered_nothing and not self._was_reached and shown.startswith("http:"):
            error.advise(f"If the server speaks TLS, use the address {with_scheme(shown, 'https')!r}.")
        return error

    def _headers(self, request: HttpRequest) -> dict[str, str]:
        for name, value in request.headers.items():
            if not (value.isascii() and value.isprintable()):
                raise BadRequestError(
                    f"The header {name} cannot be sent: {value!r} contains a character that is not printable ASCII. "
                    "Change the session_id or request_id.",
                    backend=self.backend,
                )
        headers = {"Content-Type": "application/json", **self.connection.headers, **request.headers}
        connection = self.connection
        if key := connection.admin_api_key if request.admin else connection.api_key:
            headers["Authorization"] = f"Bearer {key}"
        return headers

    async def aclose(self) -> None:
        """Close the running loop's transport. A loop that shuts down closes its own."""
        await self._transports.aclose()


def decoded(http: EngineHttp, body: bytes, kind: type[T], request_id: str | None = None) -> T:
    """Decode JSON into a wire type, whatever its content type: routers label JSON as text. Unknown fields are ignored.

    Raises:
        DamagedAnswerError: Not JSON, or another shape.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        refused = _undecodable(http, body, error, request_id)
    try:
        raise refused  # here, as `error`, which may quote the API key, would be its context
    finally:
        del refused


def _undecodable(http: EngineHttp, body: bytes, error: Exception, request_id: str | None) -> BackendError:
    problem = f"but {hidden(str(error))}" if body else "but its body is empty"
    at = re.search(r"byte (\d+)", str(error))
    start = max(0, int(at[1]) - 40) if at else 0
    before = body[max(0, start - _AROUND) : start].decode(errors="replace")
    shown = hidden(body[max(0, start - _AROUND) : start + 80 + 2 * _AROUND].decode(errors="replace"))
    refused = DamagedAnswerError(
        f"{http.backend} at {http.base_url} answered 200, {problem}: {shown[len(before) :][:80]!r}. "
        f"Check that this is a {http.backend} server and not a proxy.",
        backend=http.backend,
        status=200,
        body=body[:ERROR_BYTES].decode(errors="replace"),
        request_id=request_id,
    )
    refused.__cause__ = error
    return hide_causes(refused)


class HttpResponse(msgspec.Struct, frozen=True):
    """A response whose head has arrived.

    Attributes:
        status: HTTP status.
        headers: Names in lower case; the values of a repeated name are joined with commas.
        raw: The body as it arrives, not decompressed. Raises aiohttp.ClientError or OSError if it breaks off.
        aclose: Releases the connection, which is reused if the whole body was read.
    """

    status: int
    headers: Mapping[str, str]
    raw: AsyncIterator[bytes]
    aclose: Callable[[], Awaitable[None]]

    @property
    def kind(self) -> str:
        """The content type, or an empty string."""
        return self.headers.get("content-type", "")

    @property
    def _encoding(self) -> str:
        return self.headers.get("content-encoding", "")

    async def read(self, limit: int) -> bytes:
        """Read the whole body, decompressed.

        Raises:
            BodyTooLargeError: The body, or its announced length, exceeds `limit` bytes.
            UndecodableBodyError: It does not match its Content-Encoding.
        """
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise BodyTooLargeError(limit)
        body = decompressed(await read_whole(self.raw, limit), self._encoding, limit)
        if len(body) > limit:
            raise BodyTooLargeError(limit)
        return body

    def pieces(self) -> AsyncIterator[bytes]:
        """Read the body of a stream as it arrives.

        Raises:
            UndecodableBodyError: It is compressed.
        """
        if self._encoding.lower() not in ("", "identity"):
            raise UndecodableBodyError(f"its Content-Encoding is {self._encoding[:40]!r}, which a stream must not have")
        return self.raw

    async def text(self, limit: int) -> str:
        """Read at most `limit` bytes of the body as UTF-8, with U+FFFD for anything else."""
        body = await read_start(self.raw, limit)
        with contextlib.suppress(UndecodableBodyError):  # shown as it came
            body = decompressed(body, self._encoding, limit)[:limit]
        return body.decode("utf-8", "replace")


class HttpTransport(Protocol):
    """Connections to one server in one event loop. Users run `ConnectionPool`; tests and recorders have their own."""

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        """Send one request; return the response when its head has arrived.

        Args:
            method: Such as "POST".
            url: The whole address.
            headers: Headers of this request, including the length of a body in pieces.
            body: Pieces are sent in order; each is small enough not to block the event loop.

        Raises:
            aiohttp.ClientError, OSError: No response; `error_from_failure` maps them to backend errors.
        """

    async def aclose(self) -> None:
        """Close all connections."""


HttpTransportFactory = Callable[[], HttpTransport]
"""Makes a transport in the event loop that uses it."""
Holder = AsyncGenerator[HttpTransport]


class LoopTransports:
    """One transport per event loop. Loops and threads may share it.

    Each transport is held by a suspended async generator. A loop closes its suspended generators when it shuts down, so
    the transport is closed with its loop. (Weak references to loops do not work: a pool refers to its loop.)

    Args:
        make: Makes a transport in the event loop that uses it.
    """

    def __init__(self, make: HttpTransportFactory) -> None:
        self._make = make
        self._held: dict[asyncio.AbstractEventLoop, tuple[Holder, HttpTransport]] = {}

    @property
    def held(self) -> HttpTransport | None:
        """The running loop's transport, or None before `current` has made it."""
        held = self._held.get(asyncio.get_running_loop())
        return None if held is None else held[1]

    async def current(self) -> HttpTransport:
        """Return the running loop's transport."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            self._forget_closed_loops()
            holder = _hold(self._make, weakref.ref(self), loop)
            held = self._held[loop] = (holder, await anext(holder))
        return held[1]

    async def aclose(self) -> None:
        """Close the running loop's transport."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[0].aclose()

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget the transport of a loop that is closing it."""
        self._held.pop(loop, None)

    def _forget_closed_loops(self) -> None:
        """Forget loops that were closed without a shutdown of their async generators."""
        for loop in list(self._held):
            if loop.is_closed():
                self._held.pop(loop, None)


async def _hold(
    make: HttpTransportFactory, owner: weakref.ref[LoopTransports], loop: asyncio.AbstractEventLoop
) -> Holder:
    # A weak reference to the owner: in a reference cycle the sockets would be collected before they are closed.
    transport = make()
    try:
        yield transport
    finally:
        if (transports := owner()) is not None:
            transports.forget(loop)
        await transport.aclose()


class ConnectionPool:
    """aiohttp connections of one event loop, in which it must be made.

    Certificates are checked; proxies (also those of HTTP_PROXY), redirects and cookies are disabled. aiohttp's
    exceptions are raised unchanged.

    Args:
        socket: Path of a Unix socket, or None for hosts and ports.
        limit: Maximum number of connections; further requests wait. 0 for no limit.
        connect_timeout_s: Longest wait for a connection, in seconds.
        tls: TLS context; None for `known_authorities`.
    """

    def __init__(
        self,
        socket: str | None = None,
        limit: int = 0,
        connect_timeout_s: float = 5.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._session = aiohttp.ClientSession(
            connector=_connector(socket, limit, tls or known_authorities()),
            headers=_DEFAULT_HEADERS,
            timeout=aiohttp.ClientTimeout(sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=_LONGEST_HEADER,
            auto_decompress=False,  # without a size limit, and the status of an undecodable error would be lost
        )
        self._session._retry_connection = False  # aiohttp would retry a GET; only the backend retries

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        """See `HttpTransport.send`."""
        data = (body or None) if isinstance(body, bytes) else _each(body)
        response = await self._session.request(method, url, headers=headers, data=data, allow_redirects=False)
        release = functools.partial(_release, response)
        return HttpResponse(response.status, _decoded(response.raw_headers), response.content.iter_any(), release)

    async def aclose(self) -> None:
        """See `HttpTransport.aclose`."""
        await self._session.close()


async def _release(response: aiohttp.ClientResponse) -> None:
    if not response.closed:  # as it is at the end of its body
        response.release()
        await response.wait_for_close()


def _decoded(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return headers as text, as Latin-1 if not UTF-8; aiohttp's own have lone surrogates, which cannot be printed."""
    headers: dict[str, str] = {}
    for key, value in raw:
        name = key.decode("latin-1").lower()
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    return headers


async def _each(pieces: Pieces) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        yield piece


def known_authorities() -> ssl.SSLContext:
    """Return a TLS context that trusts the system's authorities, or certifi's where the system has none.

    OpenSSL reads `SSL_CERT_FILE` and `SSL_CERT_DIR` in place of the system's files. Cached, as reading them is slow.
    """
    return _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.lru_cache(maxsize=4)
def _authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()  # those that exist; certificates in a folder are read when they are needed
    in_folder = paths.capath is not None and bool(os.listdir(paths.capath))
    if not in_folder and not context.cert_store_stats()["x509_ca"]:
        context.load_verify_locations(certifi.where())
    return context


def _connector(unix: str | None, limit: int, tls: ssl.SSLContext) -> aiohttp.BaseConnector:
    if unix is None:
        return aiohttp.TCPConnector(
            limit=limit, keepalive_timeout=KEEP_ALIVE_S, ssl=tls, socket_factory=_closed_in_forks
        )
    return aiohttp.UnixConnector(unix, limit=limit, keepalive_timeout=KEEP_ALIVE_S)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _closed_in_forks(address: aiohttp.AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    _sockets.add(made)
    return made


def _close_in_fork() -> None:
    """Let go of the parent's connections: a server would see none of them close while this process holds a copy."""
    null = os.open(os.devnull, os.O_RDWR)
    for parents in list(_sockets):
        if parents.fileno() >= 0:  # not closed: another file would get its number, which a transport may still close
            os.dup2(null, parents.fileno(), inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_close_in_fork)
