"""Everything that goes over the wire, written down below the client: what the oracle reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
from httpx_aiohttp import AiohttpTransport

TransportFactory = Callable[[], httpx.AsyncBaseTransport]


@dataclass
class Exchange:
    """One HTTP request and as much of its answer as came.

    Attributes:
        method: Of the request.
        path: Of its URL, without the query.
        headers: Of the request, names in lower case, without what holds a key.
        sent: The request's body.
        status: The answer's status, or None when none came.
        got: The answer's body, as far as it was read.
        whole: Whether the answer came to its end.
    """

    method: str
    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None = None
    got: bytearray = field(default_factory=bytearray)
    whole: bool = False


class WireLog:
    """The exchanges of one run, in the order in which they were begun.

    Args:
        inner: Makes the transport that carries the requests; aiohttp's when None.
    """

    def __init__(self, inner: TransportFactory | None = None) -> None:
        self.exchanges: list[Exchange] = []
        self._inner = inner or _aiohttp

    def transport(self) -> httpx.AsyncBaseTransport:
        """Make a transport that writes down what it carries: the `http_transport` of a backend."""
        return _Tap(self._inner(), self.exchanges)


def _aiohttp() -> httpx.AsyncBaseTransport:
    return AiohttpTransport(trust_env=False, limits=httpx.Limits(max_connections=0, keepalive_expiry=3.0))


class _Tap(httpx.AsyncBaseTransport):
    def __init__(self, inner: httpx.AsyncBaseTransport, exchanges: list[Exchange]) -> None:
        self._inner = inner
        self._exchanges = exchanges

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = b"".join([piece async for piece in _stream(request)])
        headers = {name: value for name, value in request.headers.items() if name != "authorization"}
        exchange = Exchange(request.method, request.url.path, headers, body)
        self._exchanges.append(exchange)
        copied = httpx.Request(
            request.method, request.url, headers=request.headers, content=body, extensions=request.extensions
        )
        response = await self._inner.handle_async_request(copied)
        exchange.status = response.status_code
        if response.is_stream_consumed:  # a transport in the same process gives the body at once
            exchange.got += response.content
            exchange.whole = True
        else:
            response.stream = _Listened(response.stream, exchange)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _stream(request: httpx.Request) -> AsyncIterator[bytes]:
    if isinstance(request.stream, httpx.AsyncByteStream):
        async for piece in request.stream:
            yield piece


class _Listened(httpx.AsyncByteStream):
    def __init__(self, inner: object, exchange: Exchange) -> None:
        assert isinstance(inner, httpx.AsyncByteStream)  # of an async transport
        self._inner = inner
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            self._exchange.got += piece
            yield piece
        self._exchange.whole = True

    async def aclose(self) -> None:
        await self._inner.aclose()
