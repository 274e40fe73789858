"""Pooled connections to one server, on aiohttp: for a thirtieth of the CPU of httpx's own pool at high concurrency."""

from __future__ import annotations

import functools
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping

import aiohttp
import certifi

from tito_core.backend.carrier import Reply
from tito_core.backend.id_text import Pieces

KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Both engines close theirs after 5 s, and a request must not meet that."""
_ALWAYS = {"Accept": "*/*", "Accept-Encoding": "identity"}
"""A compressed answer costs both sides more than its bytes."""


class Pool:
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
