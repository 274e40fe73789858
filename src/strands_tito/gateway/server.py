"""Two ways to a gateway: a port, and an HTTP transport for clients in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import web

from strands_tito.gateway.reply import Refusal, Reply, Request, error_json

AnswerRequest = Callable[[Request], Awaitable[Reply]]
_SHUTDOWN_S = 2.0


class Server:
    """Serves a port with aiohttp. A client that goes away ends its request.

    Args:
        answer: Answers a request.
        host: Address to listen at.
        port: Port to listen at; 0 for a free one.
        max_body_bytes: Largest request.
    """

    def __init__(self, answer: AnswerRequest, host: str, port: int, max_body_bytes: int) -> None:
        self._answer, self._host, self._port, self._max_body_bytes = answer, host, port, max_body_bytes
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The address that it listens at.

        Raises:
            RuntimeError: It does not listen.
        """
        if self._runner is None:
            raise RuntimeError("The gateway does not listen yet: use it as `async with Gateway(policy) as gateway`.")
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The port is taken.
        """
        app = web.Application(client_max_size=self._max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=4096).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Stop listening, and end the requests that are at work."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            reply = Reply.of(error_json(Refusal(f"The body exceeds {self._max_body_bytes} bytes.", status=413)), 413)
        else:
            reply = await self._answer(_request(request.method, request.rel_url.raw_path, request.headers, body))
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        async with aclosing(reply.body) as pieces:
            with suppress(ConnectionResetError):  # the client went away
                await response.prepare(request)
                async for piece in pieces:
                    await response.write(piece)
                await response.write_eof()
        return response


def transport_of(answer: AnswerRequest, library: Any) -> Any:
    """Return a transport of `httpx` or `httpx2`; see `Gateway.transport`."""

    class Body(library.AsyncByteStream):  # type: ignore[misc]  # whichever library it is
        def __init__(self, reply: Reply) -> None:
            self._pieces = reply.body

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in self._pieces:
                yield piece

        async def aclose(self) -> None:
            await self._pieces.aclose()

    class Transport(library.AsyncBaseTransport):  # type: ignore[misc]  # the same
        async def handle_async_request(self, request: Any) -> Any:
            path = request.url.raw_path.partition(b"?")[0].decode()
            reply = await answer(_request(request.method, path, request.headers, await request.aread()))
            return library.Response(reply.status, headers=reply.headers, stream=Body(reply))

    return Transport()


def _request(method: str, path: str, headers: Any, body: bytes) -> Request:
    """Return a request, with the key of either header in which harnesses send one."""
    kind, _, key = str(headers.get("authorization", "")).partition(" ")
    key = key.strip() if kind.lower() == "bearer" else str(headers.get("x-api-key", ""))
    return Request(method, path, key, body, str(headers.get("x-stainless-retry-count", "0")) != "0")
