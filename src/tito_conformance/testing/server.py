"""A scripted engine behind a real loopback socket."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from tito_conformance.testing.engine import ScriptedEngine
from tito_conformance.testing.wire import WireResponse
from tito_core.backend.http.client import HttpResponse

_GRACE_S = 0.05  # seconds that open requests get when the server stops


class ScriptedServer:
    """Serves an engine on 127.0.0.1.

    `with server:` runs it in its own thread, for synchronous code and for clients with several event loops.
    `async with server:` runs it in the current event loop.
    """

    def __init__(self, engine: ScriptedEngine, *, port: int = 0) -> None:
        self.engine = engine
        self.port = port
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:port`.

        Raises:
            RuntimeError: The server was never started, and has no port of its own.
        """
        if not self.port:
            raise RuntimeError("The scripted server is not running. Start it with `with` or `async with`.")
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptedServer:
        """Start listening in the current event loop."""
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._stop()

    def __enter__(self) -> ScriptedServer:
        """Start listening in a new thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-server", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections and end the thread."""
        assert self._loop is not None  # set by __enter__, as is the thread
        assert self._thread is not None
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        # handler_cancellation cancels the handler of a lost connection, which is how the engine notices a disconnect.
        server = web.Server(self._respond, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=_GRACE_S)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]
        if self.engine.state.dead:
            await self._die()

    async def _stop(self) -> None:
        assert self._runner is not None  # set by _start
        await self._runner.cleanup()

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()  # not request.read(), which refuses bodies over a mebibyte
        headers = {name.lower(): value for name, value in request.headers.items()}
        response = await self.engine.handle(request.method, request.raw_path, headers, body)
        if self.engine.state.dead:
            await self._die()
        if response.dropped:
            _cut(request, reset=response.reset_after == 0)
            return web.Response()
        plain = isinstance(response.body, bytes) and response.reset_after is None and response.close_after is None
        if plain and response.drip is None:
            return web.Response(status=response.status, headers=_headers(response), body=response.content)
        return await self._send(request, response)

    async def _send(self, request: web.BaseRequest, response: WireResponse) -> web.StreamResponse:
        """Send a body in pieces. A truncated body announces its full length, so that the client notices."""
        sent = web.StreamResponse(status=response.status, headers=_headers(response))
        if isinstance(response.body, bytes):
            sent.content_length = len(response.body)
        try:
            await sent.prepare(request)
            async for piece in response.pieces():
                await sent.write(piece)
        finally:
            await response.aclose()
        if response.reset_after is not None or response.close_after is not None:
            _cut(request, reset=response.reset_after is not None)
        return sent

    async def _die(self) -> None:
        """Close every connection, and accept no new one."""
        assert self._runner is not None  # set by _start
        assert self._runner.server is not None
        assert self._site is not None
        if self._site in self._runner.sites:
            await self._site.stop()
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _headers(response: WireResponse) -> dict[str, str]:
    """Return the response's headers. The empty content type keeps aiohttp from adding its own."""
    return {"content-type": "", **{name.lower(): value for name, value in response.headers.items()}}


def _cut(request: web.BaseRequest, *, reset: bool) -> None:
    """Reset the connection, or close it after the bytes that were written."""
    transport = request.transport
    if transport is None:
        return
    if not reset:
        transport.close()
        return
    connection = transport.get_extra_info("socket")
    if connection is not None:  # a linger of zero seconds makes the close a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


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
