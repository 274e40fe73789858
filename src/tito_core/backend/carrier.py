"""The seam to the network: what carries a request, and what it brings back. Ours is aiohttp, a user's is httpx's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol, cast

import httpx

from tito_core.backend.bodies import decode_pieces, read_start, read_whole, text_of
from tito_core.backend.id_text import Pieces


class Reply(Protocol):
    """An answer whose head has come."""

    @property
    def status(self) -> int:
        """Its HTTP status."""

    @property
    def kind(self) -> str:
        """Its content type as the server names it; empty where it does not."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers, found by names in any case."""

    async def whole(self, limit: int) -> bytes:
        """Read the body to its end, decompressed.

        Raises:
            BodyTooLargeError: It is longer than `limit` bytes.
            UndecodableBodyError: It is not what its Content-Encoding says.
        """

    def pieces(self) -> AsyncIterator[bytes]:
        """Read the body as it comes, decompressed.

        Raises:
            UndecodableBodyError: It is not what its Content-Encoding says.
        """

    async def text(self, limit: int) -> str:
        """Read at most `limit` bytes of the body as text; see `text_of`."""

    async def aclose(self) -> None:
        """Let go of the connection, which is kept where all of the body was read."""


class Carrier(Protocol):
    """Connections to one server, of one event loop."""

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> Reply:
        """Send one request, and give its answer when the head of that has come.

        Args:
            method: Such as "POST".
            url: The whole address.
            headers: What it needs beside those that any request has, the length of a body in pieces among them.
            body: Pieces are sent one after the other; none is so large that it would hold the event loop up.

        Raises:
            httpx.HTTPError, aiohttp.ClientError, OSError: It got no answer; see `error_from_failure`.
        """

    async def aclose(self) -> None:
        """Close all connections."""


class OverHttpx:
    """Carries requests over any transport of httpx's, such as one in this process or a user's own.

    Args:
        transport: It.
        connect_timeout_s: Longest wait for a connection, in seconds.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, connect_timeout_s: float) -> None:
        self._transport = transport
        self._timeouts = {"connect": connect_timeout_s, "read": None, "write": None, "pool": None}

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> Reply:
        """See `Carrier`."""
        content: bytes | AsyncIterator[bytes] | None = body if isinstance(body, bytes) else _as_bytes(body)
        extensions = {"timeout": self._timeouts}
        request = httpx.Request(method, url, headers=dict(headers), content=content or None, extensions=extensions)
        return _OfHttpx(await self._transport.handle_async_request(request))

    async def aclose(self) -> None:
        """Close the transport."""
        await self._transport.aclose()


async def _as_bytes(pieces: Pieces) -> AsyncIterator[bytes]:
    """Yield bytes, as httpx promises to whatever sends them."""
    for piece in pieces:
        yield bytes(piece)


class _OfHttpx:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers = cast(Mapping[str, str], response.headers)
        self.kind = self.headers.get("content-type", "")

    async def whole(self, limit: int) -> bytes:
        return await read_whole(self.pieces(), limit)

    def pieces(self) -> AsyncIterator[bytes]:
        raw, encoding = self._raw()
        return decode_pieces(raw, encoding) if encoding else raw

    async def text(self, limit: int) -> str:
        raw, encoding = self._raw()
        return text_of(await read_start(raw, limit), encoding, self.kind, limit)

    def _raw(self) -> tuple[AsyncIterator[bytes], str]:
        """Return the body as it came and its encoding; httpx has decoded one that was made of bytes already."""
        if self._response.is_stream_consumed:
            return self._response.aiter_bytes(), ""
        return self._response.aiter_raw(), self.headers.get("content-encoding", "")

    async def aclose(self) -> None:
        await self._response.aclose()
