"""An HTTP proxy that spoils requests and answers in flight, to be put in front of a real vLLM or SGLang server.

    python tests/conformance/defects/stranger_proxy.py --upstream http://localhost:8000 --port 9000 --defect crossed

`--list` names the defects. It edits whole answers and streams alike; other requests pass through unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conformance.defects.stranger_proxy_defects import DEFECTS, Exchange, Sound, params_of, parts

PATHS = ("/v1/completions", "/inference/v1/generate", "/generate")
_HOP = {"transfer-encoding", "content-length", "content-encoding", "connection", "host", "accept-encoding"}


class Proxy:
    """Passes requests on to a server, with one defect.

    Args:
        upstream: The server's address.
        defect: What it does wrong.
    """

    def __init__(self, upstream: str, defect: Sound) -> None:
        self._upstream = upstream.rstrip("/")
        self._defect = defect
        self._count = 0
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """Return the application to run."""
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        if self._session is not None:
            await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._forward(request)
        except aiohttp.ClientConnectionError as error:
            return web.Response(status=502, text=str(error))

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True)
        body, exchange = await request.read(), None
        if request.path in PATHS and body[:1] == b"{":
            body, exchange = self._changed(request.path, body)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = self._upstream + request.raw_path
        async with self._session.request(request.method, url, headers=headers, data=body) as reply:
            kept = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP}
            if "text/event-stream" in reply.headers.get("content-type", "") and exchange is not None:
                return await self._stream(request, reply, kept, exchange)
            content = await reply.read()
            if exchange is not None and reply.status == 200:
                content = _encoded(self._whole(exchange, json.loads(content)))
            return web.Response(status=reply.status, headers=kept, body=content)

    def _changed(self, path: str, body: bytes) -> tuple[bytes, Exchange]:
        read = json.loads(body)
        params = params_of(read)
        length = params.get("max_new_tokens", params.get("max_tokens", 16)) or 0
        start = read.get("logprob_start_len")
        scoring = length <= 1 and (params.get("prompt_logprobs") is not None or (start is not None and start >= 0))
        self._count += not scoring
        exchange = Exchange(self._count, path, bool(read.get("stream")), scoring, json.loads(body))
        if not scoring:
            self._defect.request(exchange, read)
        return _encoded(read), exchange

    def _whole(self, exchange: Exchange, answer: Any) -> Any:
        for part in parts(answer, exchange):
            if not exchange.scoring:
                self._defect.part(exchange, part)
        return self._defect.whole(exchange, answer) if self._defect.buffers else answer

    async def _stream(
        self, request: web.Request, reply: aiohttp.ClientResponse, headers: dict[str, str], exchange: Exchange
    ) -> web.StreamResponse:
        sent = web.StreamResponse(status=reply.status, headers=headers)
        await sent.prepare(request)
        held = []
        async for data in _events(reply):
            event = json.loads(data)
            exchange.events += 1
            for part in parts(event, exchange):
                self._defect.part(exchange, part)
            if self._defect.buffers:
                held.append(event)
            elif self._defect.keeps(exchange, event):
                await sent.write(b"data: " + _encoded(event) + b"\n\n")
        for event in self._defect.whole(exchange, held) if held else ():
            await sent.write(b"data: " + _encoded(event) + b"\n\n")
        await sent.write(b"data: [DONE]\n\n")
        await sent.write_eof()
        return sent


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, up to the last."""
    rest = b""
    async for piece in reply.content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() not in (b"[DONE]", b""):
                yield line[5:].strip()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", help="address of the server, such as http://localhost:8000")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--defect", choices=sorted(DEFECTS), default="none")
    parser.add_argument("--list", action="store_true", help="name the defects")
    arguments = parser.parse_args()
    if arguments.list or not arguments.upstream:
        print("\n".join(f"{name:22} {made.__doc__}" for name, made in DEFECTS.items()))
        return
    web.run_app(
        Proxy(arguments.upstream, DEFECTS[arguments.defect]()).app(),
        host="127.0.0.1",
        port=arguments.port,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
