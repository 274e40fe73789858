"""A plain HTTP client over any transport, for tests of scripted engines without our backends."""

from __future__ import annotations

import asyncio
import json as codec
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tito_core.backend.http.client import HttpResponse, HttpTransport
from tito_core.backend.id_text import in_pieces

LIMIT = 1 << 30


@dataclass(frozen=True)
class Response:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        return codec.loads(self.content)


class Client:
    def __init__(self, transport: HttpTransport, base_url: str) -> None:
        self._transport = transport
        self._base_url = base_url

    async def post(self, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None) -> Response:
        async with self.stream("POST", path, json=json, headers=headers) as reply:
            return Response(reply.status, reply.headers, await reply.read(LIMIT))

    async def get(self, path: str) -> Response:
        async with self.stream("GET", path) as reply:
            return Response(reply.status, reply.headers, await reply.read(LIMIT))

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpResponse]:
        body = b"" if json is None else codec.dumps(json).encode()
        content_type = {} if json is None else {"Content-Type": "application/json"}
        async with asyncio.timeout(60):
            reply = await self._transport.send(
                method, self._base_url + path, {**content_type, **(headers or {})}, in_pieces(body)
            )
        try:
            yield reply
        finally:
            await reply.aclose()


async def lines(reply: HttpResponse) -> AsyncIterator[str]:
    """The lines of a body as they come."""
    rest = b""
    async for piece in reply.pieces():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode()
