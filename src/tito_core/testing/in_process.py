"""An httpx transport that hands requests to a scripted engine without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

from tito_core.testing.engine import ScriptedEngine
from tito_core.testing.wire import WireResponse


class InProcessTransport(httpx.AsyncBaseTransport):
    """Use as `httpx.AsyncClient(transport=InProcessTransport(engine), base_url="http://scripted")`.

    Faults become the exceptions that httpx has for them, and the client's read timeout is kept.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        if self.engine.state.dead:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = await request.aread()
        call = self.engine.handle(request.method, request.url.raw_path.decode(), headers, body)
        timeout = request.extensions.get("timeout", {}).get("read")
        try:
            response = await (call if timeout is None else asyncio.wait_for(call, timeout))
        except TimeoutError:
            raise httpx.ReadTimeout("", request=request) from None
        if response.dropped:
            raise _dropped(response, request)
        plain = isinstance(response.body, bytes) and response.reset_after is None and response.close_after is None
        if plain and response.drip is None:
            return httpx.Response(response.status, headers=dict(response.headers), content=response.content)
        stream = _Stream(response, request, timeout)
        return httpx.Response(response.status, headers=dict(response.headers), stream=stream)


class _Stream(httpx.AsyncByteStream):
    def __init__(self, response: WireResponse, request: httpx.Request, timeout: float | None) -> None:
        self._response, self._request, self._timeout = response, request, timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = self._response.pieces()
        while True:
            try:
                piece = await asyncio.wait_for(anext(pieces), self._timeout)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise httpx.ReadTimeout("", request=self._request) from None
            yield piece
        if self._response.reset_after is not None or self._response.close_after is not None:
            raise _dropped(self._response, self._request)

    async def aclose(self) -> None:
        await self._response.aclose()


def _dropped(response: WireResponse, request: httpx.Request) -> httpx.TransportError:
    if response.reset_after is not None:
        return httpx.ReadError("Connection reset by peer", request=request)
    if response.close_after == 0:
        return httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)
    message = "peer closed connection without sending complete message body"
    return httpx.RemoteProtocolError(message, request=request)
