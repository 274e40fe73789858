"""A transport that passes requests to a scripted engine without sockets."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterable, Mapping
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_reqrep import ConnectionKey

from strands_tito.testing.engine import ScriptedEngine
from strands_tito.testing.wire import WireResponse
from tito_core.backend.http.connections import HttpResponse

_REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
_RESET = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


class InProcessTransport:
    """A backend's transport: `http_transport=lambda: InProcessTransport(engine)`.

    Faults raise the errors that aiohttp raises for them. Cancelling a request acts like a client that disconnects.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | Iterable[bytes | memoryview]
    ) -> HttpResponse:
        """See `HttpTransport`."""
        where = urlsplit(url)
        if self.engine.state.dead:
            raise _refused(where.hostname or "", where.port)
        path = where.path + (f"?{where.query}" if where.query else "")
        content = body if isinstance(body, bytes) else b"".join(body)
        response = await self.engine.handle(method, path, _lower(headers), content)
        if response.dropped:
            raise aiohttp.ClientOSError(*_RESET.args) if response.reset_after == 0 else aiohttp.ServerDisconnectedError
        return HttpResponse(response.status, _lower(response.headers), _body(response), response.aclose)

    async def aclose(self) -> None:
        """See `HttpTransport`. Nothing is open."""


async def _body(response: WireResponse) -> AsyncIterator[bytes]:
    async for piece in response.pieces():
        yield piece
    if response.reset_after is not None:
        raise aiohttp.ClientPayloadError(f"Response payload is not completed: {_RESET!r}") from _RESET
    if response.close_after is not None:
        raise aiohttp.ClientPayloadError("Response payload is not completed")


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _refused(host: str, port: int | None) -> aiohttp.ClientConnectorError:
    key = ConnectionKey(host, port, False, True, None, None, None)
    return aiohttp.ClientConnectorError(key, _REFUSED)
