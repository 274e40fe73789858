"""A log of everything on the wire, recorded below the client: the oracle's source."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from tito_core.backend.http.client import ConnectionPool, HttpResponse, HttpTransport
from tito_core.backend.id_text import Pieces

TransportFactory = Callable[[], HttpTransport]


@dataclass(eq=False)
class Exchange:
    """One HTTP request, and as much of its response as arrived.

    Attributes:
        method: Of the request.
        path: Of its URL, without the query.
        headers: Of the request, names in lower case, without the API key.
        sent: The request's body.
        status: The response's status; None if no response arrived.
        got: The response's body, as far as it was read.
        whole: Whether the response arrived completely.
    """

    method: str
    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None = None
    got: bytearray = field(default_factory=bytearray)
    whole: bool = False


class WireLog:
    """The exchanges of one run, in the order in which they started.

    Args:
        inner: Makes the transport of the requests; aiohttp's pool by default, as users have it.
    """

    def __init__(self, inner: TransportFactory = ConnectionPool) -> None:
        self.exchanges: list[Exchange] = []
        self._inner = inner

    def transport(self) -> HttpTransport:
        """Return a transport that logs its exchanges: the `http_transport` of a backend."""
        return _LoggingTransport(self._inner(), self.exchanges)


class _LoggingTransport:
    def __init__(self, inner: HttpTransport, exchanges: list[Exchange]) -> None:
        self._inner = inner
        self._exchanges = exchanges

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        logged = {name.lower(): value for name, value in headers.items() if name.lower() != "authorization"}
        sent = body if isinstance(body, bytes) else b"".join(body)
        exchange = Exchange(method, urlsplit(url).path, logged, sent)
        self._exchanges.append(exchange)
        reply = await self._inner.send(method, url, headers, body)
        exchange.status = reply.status
        return replace(reply, raw=_logged(reply.raw, exchange))

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _logged(raw: AsyncIterator[bytes], exchange: Exchange) -> AsyncIterator[bytes]:
    async for piece in raw:
        exchange.got += piece
        yield piece
    exchange.whole = True
