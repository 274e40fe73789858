"""Pooled connections to one server, on aiohttp: for a thirtieth of the CPU of httpx's own pool at high concurrency."""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import cast

import aiohttp
import httpx

from tito_core.backend.bodies import BodyTooLargeError, decode_pieces, read_start, read_whole, text_of
from tito_core.backend.carrier import Reply
from tito_core.backend.id_text import Pieces

KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Both engines close theirs after 5 s, and a request must not meet that."""
_ALWAYS = {"Accept": "*/*", "Accept-Encoding": "identity"}
"""A compressed answer costs both sides more than its bytes."""


class Pool:
    """Connections of one event loop, in which it is made. Certificates are checked; proxies, redirects and cookies are
    nobody's wish. What aiohttp raises comes out as it is.

    Args:
        socket: Path of a Unix socket, or None for hosts and ports.
        limit: Most connections, past which requests wait; 0 for any number.
        connect_timeout_s: Longest wait for a connection, in seconds.
    """

    def __init__(self, socket: str | None, limit: int, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=_connector(socket, limit),
            headers=_ALWAYS,
            timeout=aiohttp.ClientTimeout(sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # `decode_pieces` does that, with a bound
        )

        self._session._retry_connection = False  # aiohttp would send a GET twice: retries have one owner, the backend

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> Reply:
        """See `Carrier`."""
        data = (body or None) if isinstance(body, bytes) else _each(body)
        return _OfAiohttp(await self._session.request(method, url, headers=headers, data=data, allow_redirects=False))

    async def aclose(self) -> None:
        """See `Carrier`."""
        await self._session.close()


class _OfAiohttp:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.kind = response.headers.get("Content-Type", "")
        self._encoding = ", ".join(response.headers.getall("Content-Encoding", ()))

    @property
    def headers(self) -> Mapping[str, str]:
        return cast(Mapping[str, str], httpx.Headers(self._response.raw_headers))

    async def whole(self, limit: int) -> bytes:
        length = self._response.content_length
        if self._encoding or length is None:
            return await read_whole(self.pieces(), limit)
        if length > limit:
            raise BodyTooLargeError(limit)
        return await self._response.read()

    def pieces(self) -> AsyncIterator[bytes]:
        raw = self._response.content.iter_any()
        return decode_pieces(raw, self._encoding) if self._encoding else raw

    async def text(self, limit: int) -> str:
        return text_of(await read_start(self._response.content.iter_any(), limit), self._encoding, self.kind, limit)

    async def aclose(self) -> None:
        self._response.release()
        await self._response.wait_for_close()


async def _each(pieces: Pieces) -> AsyncIterator[bytes | memoryview]:
    for piece in pieces:
        yield piece


@functools.cache
def tls() -> ssl.SSLContext:
    """Give how certificates are checked; it reads them once, not for every event loop."""
    return httpx.create_ssl_context(trust_env=False)


def _connector(socket: str | None, limit: int) -> aiohttp.BaseConnector:  # for whom 0 is no limit
    if socket is None:
        return aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_S, ssl=tls())
    return aiohttp.UnixConnector(socket, limit=limit, keepalive_timeout=KEEP_ALIVE_S)
