"""The bytes of each request on a real socket, the errors of answers, and the events of streams."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.backends import http_to
from tito_core.backend import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.http.body import AnswerSize, BodyTooLargeError
from tito_core.backend.http.client import (
    ConnectionPool,
    EngineHttp,
    HttpRequest,
    HttpResponse,
    LoopTransports,
    decoded,
)
from tito_core.backend.http.errors import error_from_failure, error_from_status
from tito_core.backend.http.streaming import EventReader, StreamReader
from tito_core.backend.id_text import IdText, Pieces
from tito_sglang.wire import EventAssembler

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


# Failed connections, error statuses, bodies and streams become typed errors with their values and a remedy.


B = "sglang"
LIMIT = 1 << 20


def test_a_page_of_a_proxy_is_shortened() -> None:
    def words(body: str) -> str:
        error = error_from_status(B, 500, body, {}, url="u", request_id=None)
        return str(error).removeprefix("sglang at u answered 500: ").partition(". ")[0]

    assert words(f" {'x' * 300}") == "x" * 200
    assert words(f'"{"x" * 300}"') == f'"{"x" * 199}'
    assert words('{"detail": [' + "1," * 300 + "1]}") == ('{"detail": [' + "1," * 300)[:200]
    long = str(error_from_status(B, 500, '{"detail": "' + "y" * 20_000 + '"}', {}, url="u", request_id=None))
    assert len(long) == 1000
    assert re.fullmatch(
        r"sglang at u answered 500: y+ \[\.\.\. 19,\d{3} more characters \.\.\.\] y+\. .*its log\.", long
    )


def test_retry_after_as_a_date_is_counted_by_the_clock_of_the_answer() -> None:
    headers = {"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT", "date": "Sun, 06 Nov 1994 08:49:30 GMT"}
    error = error_from_status(B, 429, "", headers, url="u", request_id=None)
    assert isinstance(error, ThrottledError)
    assert error.retry_after_s == 7.0


KEY: Any = SimpleNamespace(ssl=True, host="h", port=1)


# Refused, reset, never opened and cut off: test_connections.py, on real sockets.
FAILURES: list[tuple[Exception, bool, str, str]] = [
    (aiohttp.ClientPayloadError(), True, "closed", r"closed .*\(ClientPayloadError\)"),
    (aiohttp.ServerDisconnectedError("gone"), True, "closed", r"closed .*\(in or before its head\)"),
    (OSError("pipe"), True, "closed", r"closed .*\(pipe\)"),
    (aiohttp.ClientConnectorError(KEY, OSError(5, "no")), False, "closed", r"connect .*\(no\).*host and port"),
    (
        aiohttp.ClientConnectorError(KEY, OSError(24, "Too many open files")),
        False,
        "no-files",
        r"connect .*\(Too many open files\).*ulimit -n.*max_connections",
    ),
]


@pytest.mark.parametrize(("failure", "sent", "reason", "pattern"), FAILURES)
def test_a_connection_that_failed(failure: Exception, sent: bool, reason: str, pattern: str) -> None:
    error = error_from_failure(B, failure, url="u", connect_timeout_s=2.5, request_id="r")
    assert type(error) is EngineConnectionError
    assert re.search(pattern, str(error))
    assert "sglang at u" in str(error)
    assert (error.backend, error.request_id, error.sent) == (B, "r", sent)
    assert isinstance(error, EngineConnectionError)
    assert error.reason == reason


@pytest.mark.parametrize("kind", [aiohttp.SocketTimeoutError, TimeoutError])
def test_a_timeout_of_a_custom_transport_is_a_late_answer(kind: type[Exception]) -> None:
    error = error_from_failure(B, kind("slow"), url="u", connect_timeout_s=2.5, request_id="r")
    assert (type(error), error.backend, error.request_id) == (EngineTimeoutError, B, "r")
    assert "http_transport" in str(error)


def test_a_200_that_cannot_be_decoded_is_shown_around_the_place() -> None:
    http = http_to(B, "http://h", api_key="sekret")
    body = b"[" + b"1," * 50 + b'"a sekret", x]'
    shown = r"""byte 113.*'1,1,.*\"a <API key>\", x\]'"""
    with pytest.raises(ProtocolViolationError, match=f"sglang at http://h answered 200.*{shown}") as caught:
        decoded(http, body, list[Any], "r")
    error = caught.value
    assert (error.backend, error.status, error.request_id) == (B, 200, "r")
    assert error.body == body.decode().replace("sekret", "<API key>")
    assert decoded(http, b"[1]", list[int]) == [1]


async def streamed(body: bytes, content_type: str = "text/event-stream") -> BackendError:
    size = AnswerSize(LIMIT, LIMIT)
    reader = StreamReader(lambda: EventAssembler(LIMIT), lambda _: None, B, "http://h/generate", "r", size)

    async def raw() -> AsyncIterator[bytes]:
        yield body

    async def aclose() -> None:
        pass

    response = HttpResponse(200, {"content-type": content_type}, raw(), aclose)
    with pytest.raises(BackendError) as caught:
        await reader(response)
    assert (caught.value.backend, caught.value.request_id) == (B, "r")
    return caught.value


EVENT = b'data: {"output_ids": [5], "meta_info": {"completion_tokens": 1}}\n\n'
STREAMS: list[tuple[bytes, str, str]] = [
    (b"<html> sekret", "text/html", "'text/html'.*'<html> <API key>'"),
    (b"data: {]\n", "text/event-stream", r"byte 1\).*'{\]'"),
]


@pytest.mark.parametrize(("body", "content_type", "pattern"), STREAMS)
async def test_an_invalid_stream(body: bytes, content_type: str, pattern: str) -> None:
    http_to(B, "http://h", api_key="sekret")  # hidden from here on
    error = await streamed(body, content_type)
    assert re.search(f"Law 4: sglang at http://h/generate answered 200.*{pattern}", str(error))
    assert (type(error), error.status, error.sent) == (ProtocolViolationError, 200, True)


async def test_a_stream_that_is_not_text_is_shown_with_replacements() -> None:
    error = await streamed(b"data: " + b"x" * 79 + b"\xff" + b"y" * 2500 + b"\n")
    assert error.body == "x" * 79 + "\ufffd" + "y" * 1920
    assert f"'{'x' * 79}\ufffd'." in str(error)
    failed = await streamed(b'data: {"error": "a\xffb"}\n')
    assert failed.body == '{"error": "a\ufffdb"}'


async def test_a_stream_that_breaks_off() -> None:
    error = await streamed(EVENT)
    assert isinstance(error, EngineConnectionError)
    assert (error.sent, error.reason) == (True, "closed")
    assert re.search("sglang at http://h/generate broke off.*log", str(error))


async def test_an_error_event_may_have_a_blank_before_its_name() -> None:
    found = await streamed(EVENT + b'data: { "error": {"message": "no", "code": 400}}\n')
    assert (type(found), found.status) == (BadRequestError, 400)
    assert str(found).startswith("sglang at http://h/generate answered 400: no. ")


@pytest.mark.parametrize(
    ("status", "body", "is_tls"),
    [
        (400, "Client sent an HTTP request to an HTTPS server.", True),
        (400, '{"error": {"message": "Client sent an HTTP request to an HTTPS server."}}', False),
        (400, ' {"message": "Client sent an HTTP request to an HTTPS server."}', False),
        (500, "Client sent an HTTP request to an HTTPS server.", False),
    ],
)
def test_only_a_proxys_page_says_that_the_address_needs_https(status: int, body: str, is_tls: bool) -> None:
    """An engine's own JSON may quote such a sentence."""
    error = error_from_status(B, status, body, {}, url="http://h:1/generate", request_id="r")
    assert (getattr(error, "reason", None) == "tls") == is_tls
    assert ("https://h:1" in str(error)) == is_tls


def test_a_failure_without_a_text_is_named_by_its_type() -> None:
    error = error_from_failure(
        B, aiohttp.ConnectionTimeoutError(), url="http://h", connect_timeout_s=0.5, request_id=None
    )
    assert (getattr(error, "reason", None), "0.5 s" in str(error)) == ("never-opened", True)
    silent = aiohttp.ConnectionTimeoutError()
    silent.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    error = error_from_failure(B, silent, url="http://h", connect_timeout_s=0.5, request_id=None)
    assert (getattr(error, "reason", None), "ConnectionTimeoutError" in str(error)) == ("refused", True)
    for failure in (aiohttp.ClientPayloadError(), ConnectionAbortedError()):
        error = error_from_failure(B, failure, url="http://h", connect_timeout_s=0.5, request_id="r")
        assert type(failure).__name__ in str(error)
        assert (error.sent, error.request_id) == (True, "r")


# Server-sent events are the same however their bytes are cut.


SIZE = AnswerSize(1 << 20, 1 << 20)
DATA = st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1).map(str.strip))


@given(
    DATA.map(lambda found: [text for text in found if text and text != "[DONE]"]),
    st.data(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_whole_however_the_bytes_are_cut(events: list[str], data: st.DataObject, end: str) -> None:
    blanks = st.sampled_from(["", ": ping" + end, end])
    body = "".join(data.draw(blanks) + f"data: {event}{end}{end}" for event in events) + f"data: [DONE]{end}{end}"
    raw = body.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, found = EventReader(SIZE), []
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += reader.feed(raw[start:stop])
    assert [event.decode() for event in found] == events
    assert reader.done


def test_events_after_done_and_incomplete_events_are_ignored() -> None:
    reader = EventReader(SIZE)
    assert reader.feed(b'data:{"a": 1}\n\ndata: {"b"') == [b'{"a": 1}']
    assert not reader.done
    assert reader.feed(b": 2}\ndata: [DONE]\n\ndata: more\n\n") == [b'{"b": 2}']
    assert reader.done


@given(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 9))
def test_a_line_and_a_stream_are_read_up_to_their_limits(limit: int, lengths: list[int], spare: int) -> None:
    """Whatever comes in one piece is in memory already; so the lines come byte by byte."""
    raw = b"\n".join(b"x" * length for length in lengths)
    reader = EventReader(AnswerSize(limit, len(raw) + spare))
    longest = next((at for at, length in enumerate(lengths) if length > limit), None)
    fits = len(raw) if longest is None else sum(lengths[:longest]) + longest + limit
    for at in range(fits):
        assert reader.feed(raw[at : at + 1]) == []
    if longest is not None:
        with pytest.raises(BodyTooLargeError) as caught:
            reader.feed(raw[fits : fits + 1])
        assert caught.value.limit == limit
    else:
        reader.feed(b"\n" * spare)
        with pytest.raises(BodyTooLargeError) as caught:
            reader.feed(b"\n")
        assert caught.value.limit == len(raw) + spare
