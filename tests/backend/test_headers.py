"""The bytes of each request on a real socket: each header once, and the whole body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from support.backends import http_to
from tito_core.backend import AuthenticationError, BackendError, ServerError, ThrottledError
from tito_core.backend.http.client import (
    ConnectionPool,
    EngineHttp,
    HttpRequest,
    HttpResponse,
    LoopTransports,
    decoded,
)
from tito_core.backend.id_text import IdText, Pieces

LONG = IdText.of(np.full(60_000, 12345, np.int32)).body({"a": 1}, "ids")
BODIES = {"none": b"", "one piece": b'{"a": 1}', "pieces": LONG}


class Listener:
    """Keeps what it is sent, and answers each request alike."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[list[str]] = []
        self.bodies: list[bytes] = []
        self.port = 0
        self.talks: set[asyncio.Task[None] | None] = set()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.talks.add(asyncio.current_task())
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
                return
            self.heads.append(head.strip().split("\r\n"))
            length = [line.split(": ")[1] for line in self.heads[-1] if line.lower().startswith("content-length")]
            self.bodies.append(await reader.readexactly(int(length[0]) if length else 0))
            writer.write(self.answer)


@asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[Listener]:
    listener = Listener(answer)
    server = await asyncio.start_server(listener.talk, "127.0.0.1", 0, limit=2**22)
    listener.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield listener
        finally:
            await asyncio.gather(*filter(None, listener.talks))  # each ends as its connection does


def answer(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_an_answer_may_have_a_long_header() -> None:
    """Gateways send cookies, policies and traces of many kilobytes."""
    async with listening(answer(b"{}", f"X-Trace: {'a' * 60_000}")) as listener:
        http = http_to("vllm", f"http://127.0.0.1:{listener.port}")
        assert await http.send_once(HttpRequest("/x", b"{}", {})) == b"{}"
        await http.aclose()


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("name", BODIES)
async def test_each_header_is_sent_once_with_the_whole_body(name: str, method: str) -> None:
    body = BODIES[name]
    async with listening(answer(b"{}", "Content-Type: application/json; charset=utf-8")) as listener:
        http = http_to("vllm", f"http://127.0.0.1:{listener.port}", api_key="sk-1")
        for _ in range(2):
            answered = await http.send_once(HttpRequest("/x", body, {"X-Session-ID": "s"}), method=method)
            assert answered == b"{}"
        await http.aclose()
    whole = body if isinstance(body, bytes) else b"".join(body)
    assert listener.bodies == [whole, whole]
    assert name != "pieces" or not isinstance(body, bytes)
    for first, *lines in listener.heads:
        assert first == f"{method} /x HTTP/1.1"
        sent = {line.split(": ")[0].lower(): line.split(": ")[1] for line in lines}
        assert len(sent) == len(lines)
        expected = {
            "host": f"127.0.0.1:{listener.port}",
            "content-type": "application/json",
            "authorization": "Bearer sk-1",
            "x-session-id": "s",
            "accept": "*/*",
            "accept-encoding": "identity",
        }
        if whole or method == "POST":
            expected["content-length"] = str(len(whole))
        assert {name: value for name, value in sent.items() if name != "user-agent"} == expected


STATUSES = {"401 No": AuthenticationError, "503 Busy": ThrottledError, "500 Broken": ServerError}


@pytest.mark.parametrize("packing", ["br", "zstd", "unheard-of", "identity", "", "gzip", "deflate", "gzip, deflate"])
async def test_an_error_with_a_wrong_encoding_keeps_its_status(packing: str) -> None:
    for status, error in STATUSES.items():
        head = f"HTTP/1.1 {status}\r\nContent-Length: 4\r\nContent-Encoding: {packing}\r\n\r\n"
        async with listening((head + "gone").encode()) as listener:  # which no codec can read
            http = http_to("vllm", f"http://127.0.0.1:{listener.port}")
            with pytest.raises(error, match="gone") as caught:
                await http.send_once(HttpRequest("/x", b"{}"))
            await http.aclose()
        assert caught.value.status == int(status[:3])


@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "zstd", "gzip, deflate"])
async def test_an_answer_that_cannot_be_decoded_is_refused(packing: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nContent-Encoding: {packing}\r\n"
    async with listening((head + "Content-Type: application/json\r\n\r\n\xe9 no json").encode("latin-1")) as listener:
        http = http_to("vllm", f"http://127.0.0.1:{listener.port}")
        with pytest.raises(BackendError) as caught:
            await decode(http, await http.send_once(HttpRequest("/x", b"{}")))
        await http.aclose()
    assert f"127.0.0.1:{listener.port}" in str(caught.value)


async def test_a_redirect_to_a_non_ascii_address_can_be_printed() -> None:
    head = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: http://\xe9\xff/\r\n\r\n"
    async with listening(head) as listener:
        http = http_to("vllm", f"http://127.0.0.1:{listener.port}")
        with pytest.raises(BackendError, match="a redirect to http://éÿ/") as caught:
            await http.send_once(HttpRequest("/x", b"{}"))
        await http.aclose()
    assert str(caught.value).encode()


async def decode(http: EngineHttp, raw: bytes) -> object:
    return decoded(http, raw, dict[str, int])


async def test_a_custom_transport_gets_the_same_request() -> None:
    seen: list[tuple[str, str, Mapping[str, str], bytes]] = []

    class Recording:
        async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
            seen.append((method, url, headers, body if isinstance(body, bytes) else b"".join(body)))
            return HttpResponse(200, {}, pieces(), self.aclose)

        async def aclose(self) -> None:
            pass

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{}"

    http = http_to("vllm", "http://h:8000/base", http_transport=Recording)
    for body in BODIES.values():
        assert (await http.send(HttpRequest("/x", body))) == b"{}"
    await http.aclose()
    wholes = [body if isinstance(body, bytes) else b"".join(body) for body in BODIES.values()]
    assert [(method, url, body) for method, url, _, body in seen] == [
        ("POST", "http://h:8000/base/x", whole) for whole in wholes
    ]
    assert [headers.get("Content-Length") for _, _, headers, _ in seen] == [None, None, str(len(wholes[-1]))]


async def test_cookies_are_not_kept() -> None:
    async with listening(answer(b"{}", "Set-Cookie: a=b; Path=/")) as listener:
        pool = ConnectionPool()
        for _ in range(2):
            # A name, since aiohttp keeps no cookies of an address.
            reply = await pool.send("GET", f"http://localhost:{listener.port}/x", {}, b"")
            await reply.aclose()
        await pool.aclose()
    assert len(listener.heads) == 2
    assert [line for head in listener.heads for line in head if line.lower().startswith("cookie")] == []


@pytest.mark.parametrize("socket", [None, "none.sock"])
@pytest.mark.parametrize("limit", [0, 7])
async def test_a_pool_has_its_limit_of_connections(socket: str | None, limit: int) -> None:
    """aiohttp's own default of 100 would hold back rollouts without a word."""
    pool = ConnectionPool(socket, limit)
    assert pool._session.connector is not None
    assert pool._session.connector.limit == limit
    await pool.aclose()


def test_a_loop_closes_its_transport_when_it_shuts_down() -> None:
    closed: list[str] = []

    class Transport:
        async def aclose(self) -> None:
            closed.append("closed")

    async def held() -> Any:
        return transports.held

    transports = LoopTransports(Transport)  # type: ignore[arg-type]  # it only closes
    loop = asyncio.new_event_loop()
    try:
        first = loop.run_until_complete(transports.current())
        assert loop.run_until_complete(transports.current()) is first
        loop.run_until_complete(transports.aclose())
        assert loop.run_until_complete(transports.current()) is not first  # after an own close it may go on
        loop.run_until_complete(loop.shutdown_asyncgens())
        assert closed == ["closed", "closed"]
        assert loop.run_until_complete(held()) is None
    finally:
        loop.close()
