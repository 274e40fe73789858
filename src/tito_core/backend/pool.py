"""Pooled connections to one server: httpx's API on aiohttp, for a fifth of the CPU of httpx's own pool."""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Both engines close theirs after 5 s, and a request must not meet that."""


class Pool(AiohttpTransport):
    """An httpx transport on aiohttp. Certificates are checked; proxies and redirects are nobody's wish.

    What aiohttp raises comes out as it is, since httpx-aiohttp's own names for it tell a refused connection from no
    timeout. A body comes in pieces as large as they arrive.

    Args:
        socket: Path of a Unix socket, or None for hosts and ports.
        limit: Most connections, past which requests wait; 0 for any number.
    """

    def __init__(self, socket: str | None = None, limit: int = 0) -> None:
        super().__init__(verify=tls(), trust_env=False, client=functools.partial(_session, socket, limit))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        if not isinstance(self.client, aiohttp.ClientSession):
            self.client = self.get_client()
        timeout = request.extensions.get("timeout", {})
        response = await self.client.request(
            request.method,
            str(request.url),
            headers=[(name.decode(), value.decode()) for name, value in (*request.headers.raw, *_OURS)],
            data=_data(request),
            allow_redirects=False,
            timeout=_timeout(timeout.get("connect"), timeout.get("read")),
        )
        return httpx.Response(response.status, headers=response.raw_headers, stream=Body(response))


class Whole(httpx.ByteStream):
    """A request's body in one piece.

    Attributes:
        body: It.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self.body = body


class Body(httpx.AsyncByteStream):
    """An answer's body, as it arrives or whole.

    Attributes:
        kind: Its content type as the server names it; empty where it does not.
        plain: Whether it comes as it is, neither compressed nor encoded in another way.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.kind = response.headers.get("Content-Type", "")
        self.plain = "Content-Encoding" not in response.headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._response.content.iter_any():
            yield piece

    async def whole(self) -> bytes:
        """Read it to its end, past what httpx does with each piece."""
        return await self._response.read()

    async def aclose(self) -> None:
        """Let go of the connection, which is kept where all of it was read."""
        self._response.release()
        await self._response.wait_for_close()


def _data(request: httpx.Request) -> bytes | httpx.AsyncByteStream | httpx.SyncByteStream | None:
    if isinstance(request.stream, Whole):
        return request.stream.body
    try:
        return request.content or None
    except httpx.RequestNotRead:
        return request.stream


_OURS = ((b"Accept", b"*/*"), (b"Accept-Encoding", b"identity"))
"""A compressed answer costs both sides more than its bytes."""


@functools.lru_cache(maxsize=64)
def _timeout(connect: float | None, read: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(sock_connect=connect, sock_read=read)


@functools.cache
def tls() -> ssl.SSLContext:
    """Give how certificates are checked; it reads them once, not for every event loop."""
    return httpx.create_ssl_context(trust_env=False)


def _session(socket: str | None, limit: int) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector  # for whom 0 is no limit
    if socket is None:
        connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_S, ssl=tls())
    else:
        connector = aiohttp.UnixConnector(socket, limit=limit, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,  # httpx does that
        cookie_jar=aiohttp.DummyCookieJar(),
    )
