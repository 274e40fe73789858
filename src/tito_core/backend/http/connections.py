"""Connections to one server: the seam to the network, one pool of connections per event loop, and aiohttp below it."""

from __future__ import annotations

import asyncio
import functools
import http.client
import socket
import ssl
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import certifi

from tito_core.backend.http.bodies import ERROR_BYTES, BodyTooLargeError, decode_pieces, read_start, read_whole, text_of
from tito_core.backend.id_text import Pieces


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer whose head has come.

    Attributes:
        status: HTTP status.
        headers: Names in lower case; the values of a repeated name are joined with commas.
        raw: The body as it comes, not decompressed. Raises aiohttp.ClientError or OSError where it breaks off.
        aclose: Releases the connection, which is kept where the whole body was read.
    """

    status: int
    headers: Mapping[str, str]
    raw: AsyncIterator[bytes]
    aclose: Callable[[], Awaitable[None]]

    @property
    def kind(self) -> str:
        """The content type; empty where the server names none."""
        return self.headers.get("content-type", "")

    @property
    def _encoding(self) -> str:
        return self.headers.get("content-encoding", "")

    async def whole(self, limit: int) -> bytes:
        """Read the body to its end, decompressed.

        Raises:
            BodyTooLargeError: It is longer than `limit` bytes, or its announced length is.
            UndecodableBodyError: It does not match its Content-Encoding.
        """
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise BodyTooLargeError(limit)
        return await read_whole(self.pieces(), limit)

    def pieces(self) -> AsyncIterator[bytes]:
        """Read the body as it comes, decompressed.

        Raises:
            UndecodableBodyError: It does not match its Content-Encoding.
        """
        return decode_pieces(self.raw, self._encoding) if self._encoding else self.raw

    async def text(self, limit: int) -> str:
        """Read at most `limit` bytes of the body as text; see `text_of`."""
        return text_of(await read_start(self.raw, limit), self._encoding, self.kind, limit)


class HttpTransport(Protocol):
    """Connections to one server, of one event loop. `Pool` is what users run; tests and recorders bring their own."""

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> Reply:
        """Send one request; return the answer once its head has come.

        Args:
            method: Such as "POST".
            url: The whole address.
            headers: Those of this request, the length of a body in pieces among them.
            body: Pieces are sent one after the other; none is so large that it would block the event loop.

        Raises:
            aiohttp.ClientError, OSError: No answer came; see `error_from_failure` for what each becomes.
        """

    async def aclose(self) -> None:
        """Close all connections."""


Make = Callable[[], HttpTransport]
Holder = AsyncGenerator[HttpTransport]


class LoopEndingError(RuntimeError):
    """A request was made in an event loop that is ending."""


class LoopTransports:
    """Pools by event loop; loops and threads may share it.

    A loop closes the suspended async generators that are left when it ends, or that nobody refers to any more, so a
    pool that is held in one is closed with it. (Weak references to loops would not do: a pool holds its loop.)

    Args:
        make: Makes one pool, in the event loop that it is for.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._ending: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._held: dict[asyncio.AbstractEventLoop, tuple[Holder, HttpTransport]] = {}

    @property
    def held(self) -> HttpTransport | None:
        """The running loop's pool, or None where `current` has yet to make it."""
        held = self._held.get(asyncio.get_running_loop())
        return None if held is None else held[1]

    async def current(self) -> HttpTransport:
        """Return the running loop's pool.

        Raises:
            LoopEndingError: The loop has closed its async generators, and so the pool: there will be no other.
        """
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            if loop in self._ending:
                raise LoopEndingError("This event loop is ending and has closed its connections: nothing can be sent.")
            self._forget_closed_loops()
            holder = _hold(self._make, weakref.ref(self), loop)
            held = self._held[loop] = (holder, await anext(holder))
        return held[1]

    async def aclose(self) -> None:
        """Close the running loop's pool."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[0].aclose()

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of the pool of a loop that closes it."""
        if self._held.pop(loop, None) is not None:  # not by `aclose`, after which there may be another
            self._ending.add(loop)

    def _forget_closed_loops(self) -> None:
        """Let go of loops that were closed without shutting their async generators down."""
        for loop in list(self._held):
            if loop.is_closed():
                self._held.pop(loop, None)


async def _hold(make: Make, owner: weakref.ref[LoopTransports], loop: asyncio.AbstractEventLoop) -> Holder:
    # The owner weakly: in a reference cycle the pool's sockets would be collected before it could be closed.
    carrier = make()
    try:
        yield carrier
    finally:
        if (pools := owner()) is not None:
            pools.forget(loop)
        await carrier.aclose()


KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Both engines close theirs after 5 s, and a request must not meet that."""
_ALWAYS = {"Accept": "*/*", "Accept-Encoding": "identity"}
"""A compressed answer costs both sides more than its bytes."""


class ConnectionPool:
    """Connections of one event loop, in which it is made. Certificates are checked; proxies, redirects and cookies are
    disabled. What aiohttp raises comes out as it is.

    Args:
        socket: Path of a Unix socket, or None for hosts and ports.
        limit: Most connections, past which requests wait; 0 for any number.
        connect_timeout_s: Longest wait for a connection, in seconds.
        tls: How certificates are checked; by certifi's authorities when None.
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
            headers=_ALWAYS,
            timeout=aiohttp.ClientTimeout(sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # `decode_pieces` does that, with a bound
        )

        self._session._retry_connection = False  # aiohttp would send a GET twice: retries have one owner, the backend

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> Reply:
        """See `Carrier`."""
        data = (body or None) if isinstance(body, bytes) else _each(body)
        response = await self._session.request(method, url, headers=headers, data=data, allow_redirects=False)
        release = functools.partial(_release, response)
        return Reply(response.status, _decoded(response.raw_headers), response.content.iter_any(), release)

    async def aclose(self) -> None:
        """See `Carrier`."""
        await self._session.close()


async def _release(response: aiohttp.ClientResponse) -> None:
    response.release()
    await response.wait_for_close()


def _decoded(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return headers as text. aiohttp's own hold lone surrogates for what is not UTF-8, which nothing could print."""
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


@functools.cache
def known_authorities() -> ssl.SSLContext:
    """Return how certificates are checked; it reads them once, not for every event loop."""
    return ssl.create_default_context(cafile=certifi.where())


def _connector(socket: str | None, limit: int, tls: ssl.SSLContext) -> aiohttp.BaseConnector:  # for whom 0 is no limit
    if socket is None:
        return aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_S, ssl=tls)
    return aiohttp.UnixConnector(socket, limit=limit, keepalive_timeout=KEEP_ALIVE_S)


@dataclass(frozen=True, slots=True)
class Call:
    """One POST, to a server at an http(s) address or behind a Unix socket.

    Attributes:
        root: The server's http(s) address.
        socket: Path of its Unix socket, or None.
        path: Path of the call.
        body: JSON.
        headers: Authorization among them.
        tls: Its certificates are checked by this.
    """

    root: str
    socket: str | None
    path: str
    body: bytes
    headers: Mapping[str, str]
    tls: Callable[[], ssl.SSLContext]

    def post(self, timeout_s: float) -> None:
        """Send it, without an event loop: where this is needed there may be none, and no threads any more."""
        where = urlsplit(self.root)
        connection = self._connection(where.hostname or "localhost", where.port, where.scheme == "https", timeout_s)
        try:
            connection.request("POST", where.path + self.path, self.body, dict(self.headers))
            connection.getresponse().read(ERROR_BYTES)
        finally:
            connection.close()

    def _connection(self, host: str, port: int | None, tls: bool, timeout_s: float) -> http.client.HTTPConnection:
        if self.socket is not None:
            return _UnixConnection(self.socket, timeout_s)
        if tls:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self.tls())
        return http.client.HTTPConnection(host, port, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
