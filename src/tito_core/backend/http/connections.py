"""Connections to one server: the transport protocol, one aiohttp pool per event loop, and a blocking POST."""

from __future__ import annotations

import asyncio
import functools
import http.client
import os
import socket
import ssl
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import certifi

from tito_core.backend.http.bodies import ERROR_BYTES, BodyTooLargeError, decode_pieces, read_start, read_whole, text_of
from tito_core.backend.id_text import Pieces


@dataclass(frozen=True, slots=True)
class HttpResponse:
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
        return await read_whole(self.pieces(), limit)

    def pieces(self) -> AsyncIterator[bytes]:
        """Read the body as it arrives, decompressed.

        Raises:
            UndecodableBodyError: It does not match its Content-Encoding.
        """
        return decode_pieces(self.raw, self._encoding) if self._encoding else self.raw

    async def text(self, limit: int) -> str:
        """Read at most `limit` bytes of the body as text; see `text_of`."""
        return text_of(await read_start(self.raw, limit), self._encoding, self.kind, limit)


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


Make = Callable[[], HttpTransport]
Holder = AsyncGenerator[HttpTransport]


class LoopEndingError(RuntimeError):
    """A request was made in an event loop that is shutting down."""


class LoopTransports:
    """One transport per event loop. Loops and threads may share it.

    Each transport is held by a suspended async generator. A loop closes its suspended generators when it shuts down, so
    the transport is closed with its loop. (Weak references to loops do not work: a pool refers to its loop.)

    Args:
        make: Makes a transport in the event loop that uses it.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._ending: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._held: dict[asyncio.AbstractEventLoop, tuple[Holder, HttpTransport]] = {}

    @property
    def held(self) -> HttpTransport | None:
        """The running loop's transport, or None before `current` has made it."""
        held = self._held.get(asyncio.get_running_loop())
        return None if held is None else held[1]

    async def current(self) -> HttpTransport:
        """Return the running loop's transport.

        Raises:
            LoopEndingError: The loop is shutting down and has closed its transport.
        """
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            if loop in self._ending:
                raise LoopEndingError(
                    "Cannot send a request: this event loop is shutting down and has closed its connections."
                )
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
        if self._held.pop(loop, None) is not None:  # not after `aclose`, which allows a new transport
            self._ending.add(loop)

    def _forget_closed_loops(self) -> None:
        """Forget loops that were closed without a shutdown of their async generators."""
        for loop in list(self._held):
            if loop.is_closed():
                self._held.pop(loop, None)


async def _hold(make: Make, owner: weakref.ref[LoopTransports], loop: asyncio.AbstractEventLoop) -> Holder:
    # A weak reference to the owner: in a reference cycle the sockets would be collected before they are closed.
    transport = make()
    try:
        yield transport
    finally:
        if (transports := owner()) is not None:
            transports.forget(loop)
        await transport.aclose()


KEEP_ALIVE_S = 3.0
"""Seconds that an idle connection is kept. Both engines close idle connections after 5 s."""
_DEFAULT_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}
"""Compression costs client and server more time than it saves."""


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
            auto_decompress=False,  # `decode_pieces` decompresses with a size limit
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


def _connector(socket: str | None, limit: int, tls: ssl.SSLContext) -> aiohttp.BaseConnector:
    if socket is None:
        return aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_S, ssl=tls)
    return aiohttp.UnixConnector(socket, limit=limit, keepalive_timeout=KEEP_ALIVE_S)


@dataclass(frozen=True, slots=True)
class BlockingPost:
    """One POST without an event loop, to an http(s) address or a Unix socket.

    Attributes:
        root: The server's http(s) address.
        socket: Path of its Unix socket, or None.
        path: Path of the request.
        body: JSON.
        headers: Headers, including Authorization.
        tls: Makes the TLS context.
    """

    root: str
    socket: str | None
    path: str
    body: bytes
    headers: Mapping[str, str] = field(repr=False)
    tls: Callable[[], ssl.SSLContext]

    def send(self, timeout_s: float) -> None:
        """Send the request and read the response. Works at interpreter exit, without event loops or threads."""
        url = urlsplit(self.root)
        connection = self._connection(url.hostname or "localhost", url.port, url.scheme == "https", timeout_s)
        try:
            connection.request("POST", url.path + self.path, self.body, dict(self.headers))
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
