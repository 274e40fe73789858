"""Everything that goes over the wire, written down below the client: what the oracle reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from tito_core.backend.http.connections import ConnectionPool, HttpResponse, HttpTransport
from tito_core.backend.id_text import Pieces

TransportFactory = Callable[[], HttpTransport]


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
        inner: Makes the carrier of the requests; aiohttp's pool by default, as users have it.
    """

    def __init__(self, inner: TransportFactory = ConnectionPool) -> None:
        self.exchanges: list[Exchange] = []
        self._inner = inner

    def transport(self) -> HttpTransport:
        """Return a carrier that records what it carries: the `http_transport` of a backend."""
        return _Tap(self._inner(), self.exchanges)


class _Tap:
    def __init__(self, inner: HttpTransport, exchanges: list[Exchange]) -> None:
        self._inner = inner
        self._exchanges = exchanges

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        kept = {name.lower(): value for name, value in headers.items() if name.lower() != "authorization"}
        sent = body if isinstance(body, bytes) else b"".join(body)
        exchange = Exchange(method, urlsplit(url).path, kept, sent)
        self._exchanges.append(exchange)
        reply = await self._inner.send(method, url, headers, body)
        exchange.status = reply.status
        return replace(reply, raw=_recorded(reply.raw, exchange))

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _recorded(raw: AsyncIterator[bytes], exchange: Exchange) -> AsyncIterator[bytes]:
    async for piece in raw:
        exchange.got += piece
        yield piece
    exchange.whole = True
