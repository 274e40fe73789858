"""Every sentence about what comes instead of an answer, word for word."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from tito_core.backend import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.http.bodies import AnswerSize
from tito_core.backend.http.connections import HttpResponse
from tito_core.backend.http.errors import error_from_failure, error_from_status
from tito_core.backend.http.streaming import StreamReader
from tito_core.backend.http.transport import EngineHttp, ResponseBody, decoded
from tito_sglang.wire import Events

B = "sglang"
LIMIT = 1 << 20


def said(kind: type[Exception], sentence: str, act: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    assert str(caught.value) == sentence
    if isinstance(caught.value, BackendError):
        assert caught.value.backend == B
    return caught.value


AT = "sglang at http://h/generate answered"
AGAIN = (
    "If the server answered there before, it may have been restarted without this endpoint: connect again with a new "
    "Policy or model."
)
STATUSES: list[tuple[int, str, Mapping[str, str], type[BackendError], str]] = [
    (401, "no", {}, AuthenticationError, f"{AT} 401: no. Give the server's key as api_key or in TITO_API_KEY."),
    (
        403,
        "",
        {},
        AuthenticationError,
        f"{AT} 403: HTTP 403 without a message. Give the server's key as api_key or in TITO_API_KEY. {AGAIN}",
    ),
    (
        429,
        '{"detail": "full."}',
        {},
        ThrottledError,
        f"{AT} 429: full. The server is overloaded; lower the concurrency or add servers.",
    ),
    (
        503,
        '{"message": "full"}',
        {},
        ThrottledError,
        f"{AT} 503: full. The server is overloaded; lower the concurrency or add servers.",
    ),
    (
        400,
        '{"error": {"message": "the maximum model length is 5"}}',
        {},
        ContextLengthError,
        f"{AT} 400: the maximum model length is 5. Shorten the history or start the server with a longer context.",
    ),
    (
        404,
        '{"error": "no  such\\n model"}',
        {},
        BadRequestError,
        f"{AT} 404: no such model. Check the model's name, the address, and that this is the right kind of server. "
        f"{AGAIN}",
    ),
    (
        400,
        '{"error": {"message": "temperature must be < 2"}}',
        {"location": "/login"},
        BadRequestError,
        f"{AT} 400: temperature must be < 2. Fix the field that the server reports; this request is not retried.",
    ),
    (
        422,
        "no",
        {},
        BadRequestError,
        f"{AT} 422: no. Fix the field that the server reports; this request is not retried.",
    ),
    (
        499,
        "no",
        {},
        BadRequestError,
        f"{AT} 499: no. Fix the field that the server reports; this request is not retried.",
    ),
    (500, "no", {}, ServerError, f"{AT} 500: no. The server failed by itself; its log says more."),
    (
        500,
        "the maximum model length is 5",
        {},
        ServerError,
        f"{AT} 500: the maximum model length is 5. The server failed by itself; its log says more.",
    ),
    (
        302,
        "no",
        {"location": "http://x"},
        ProtocolViolationError,
        f"{AT} 302: a redirect to http://x. Only a 200 is an answer, and redirects are not followed: give the server's "
        "own address.",
    ),
]


@pytest.mark.parametrize(("status", "body", "headers", "kind", "sentence"), STATUSES)
def test_a_status_that_is_no_200(
    status: int, body: str, headers: Mapping[str, str], kind: type[BackendError], sentence: str
) -> None:
    error = error_from_status(B, status, body, headers, url="http://h/generate", request_id="r")
    assert (type(error), str(error)) == (kind, sentence)
    assert (error.backend, error.status, error.body, error.request_id) == (B, status, body, "r")


def test_a_page_of_a_proxy_is_shortened() -> None:
    def words(body: str) -> str:
        error = error_from_status(B, 500, body, {}, url="u", request_id=None)
        return str(error).removeprefix("sglang at u answered 500: ").partition(". ")[0]

    assert words(f" {'x' * 300}") == "x" * 200
    assert words(f'"{"x" * 300}"') == f'"{"x" * 199}'
    assert words('{"detail": [' + "1," * 300 + "1]}") == ('{"detail": [' + "1," * 300)[:200]
    assert words('{"detail": "' + "y" * 2000 + '"}') == "y" * 1000


def test_when_to_come_back() -> None:
    for header, seconds in (("7", 7.0), ("0.5", 0.5), ("soon", None), ("inf", None), (None, None)):
        headers = {} if header is None else {"retry-after": header}
        error = error_from_status(B, 429, "", headers, url="u", request_id=None)
        assert isinstance(error, ThrottledError)
        assert error.retry_after_s == seconds


BROKE = (
    "The connection to sglang at u was {} before its answer was whole ({}). Is the server still running? Its log may "
    "say why it hung up."
)
NOBODY = "No connection to sglang at u ({}). Is the server running, and are host and port right?"
LATE = (
    "No connection to sglang at u (it did not open within 2.5 s). A firewall may drop the packets, or the server "
    "accepts no more connections; raise connect_timeout_s to wait longer."
)
KEY: Any = SimpleNamespace(ssl=True, host="h", port=1)


FAILURES: list[tuple[Exception, bool, str, str]] = [
    (aiohttp.ClientPayloadError("cut"), True, "closed", BROKE.format("closed", "cut")),
    (aiohttp.ClientPayloadError(), True, "closed", BROKE.format("closed", "ClientPayloadError")),
    (aiohttp.ServerDisconnectedError("gone"), True, "closed", BROKE.format("closed", "in or before its head")),
    (ConnectionResetError(104, "reset"), True, "reset", BROKE.format("reset", "[Errno 104] reset")),
    (OSError("pipe"), True, "closed", BROKE.format("closed", "pipe")),
    (
        aiohttp.ClientConnectorError(KEY, OSError(5, "no")),
        False,
        "closed",
        NOBODY.format("no"),
    ),
    (aiohttp.ConnectionTimeoutError("slow"), False, "never-opened", LATE),
    (
        aiohttp.ClientConnectorError(KEY, OSError(111, "Connection refused")),
        False,
        "refused",
        NOBODY.format("it was refused: Connection refused"),
    ),
]


@pytest.mark.parametrize(("failure", "sent", "reason", "sentence"), FAILURES)
def test_a_connection_that_failed(failure: Exception, sent: bool, reason: str, sentence: str) -> None:
    error = error_from_failure(B, failure, url="u", connect_timeout_s=2.5, request_id="r")
    assert (type(error), str(error)) == (EngineConnectionError, sentence)
    assert (error.backend, error.request_id, error.sent) == (B, "r", sent)
    assert isinstance(error, EngineConnectionError)
    assert error.reason == reason


@pytest.mark.parametrize("kind", [aiohttp.SocketTimeoutError, TimeoutError])
def test_a_time_limit_of_a_users_transport_is_a_late_answer(kind: type[Exception]) -> None:
    error = error_from_failure(B, kind("slow"), url="u", connect_timeout_s=2.5, request_id="r")
    assert (type(error), error.backend, error.request_id) == (EngineTimeoutError, B, "r")
    assert "http_transport" in str(error)


def test_what_speaks_no_http() -> None:
    failure = aiohttp.ClientResponseError(SimpleNamespace(real_url="x"), (), message="Bad\n status  line")
    error = error_from_failure(B, failure, url="u", connect_timeout_s=2.5, request_id="r")
    assert (type(error), error.backend, error.request_id, error.sent) == (ProtocolViolationError, B, "r", False)
    assert str(error) == "What answers at u does not speak HTTP (Bad status line). Are host and port sglang's?"


PROXY = "Is this a sglang server, and no proxy's page?"
DECODED: list[tuple[bytes, str, str]] = [
    (
        b"<html>",
        "text/html",
        f"sglang at http://h answered 200, but its content type is 'text/html': it says '<html>'. {PROXY}",
    ),
    (b"", "text/html", f"sglang at http://h answered 200, but its body is empty: it says ''. {PROXY}"),
    (
        b"[" + b"1," * 50 + b'"secret key", x]',
        "application/json",
        "sglang at http://h answered 200, but JSON is malformed: invalid character (byte 115): it says "
        f"'1,1,1,1,1,1,1,1,1,1,1,1,1,\"secret <API key>\", x]'. {PROXY}",
    ),
]


@pytest.mark.parametrize(("body", "content_type", "sentence"), DECODED)
def test_a_200_that_is_none(body: bytes, content_type: str, sentence: str) -> None:
    http = EngineHttp(B, "http://h", api_key="key")
    answer = ResponseBody(body, content_type)
    error = said(ProtocolViolationError, sentence, lambda: decoded(http, answer, list[Any], "r"))
    assert (error.status, error.request_id) == (200, "r")
    assert error.body == http.hide_key(body.decode())
    assert decoded(http, ResponseBody(b"[1]", ""), list[int]) == [1]
    assert decoded(http, ResponseBody(b"[1]", "application/json; charset=utf-8"), list[int]) == [1]


async def streamed(body: bytes, content_type: str = "text/event-stream") -> BackendError:
    hide, size = (lambda text: text.replace("key", "<API key>")), AnswerSize(LIMIT, LIMIT)
    reader = StreamReader(lambda: Events(LIMIT), lambda _: None, B, "http://h/generate", "r", hide, size)

    async def raw() -> AsyncIterator[bytes]:
        yield body

    async def aclose() -> None:
        pass

    reply = HttpResponse(200, {"content-type": content_type}, raw(), aclose)
    with pytest.raises(BackendError) as caught:
        await reader(reply)
    assert (caught.value.backend, caught.value.request_id) == (B, "r")
    return caught.value


EVENT = b'data: {"output_ids": [5], "meta_info": {"completion_tokens": 1}}\n\n'
STREAMS: list[tuple[bytes, str, str]] = [
    (
        b"<html>key",
        "text/html",
        "its content type is 'text/html', though a stream was asked for: it says '<html><API key>'. Nothing of it is "
        "kept.",
    ),
    (b"data: [DONE]\n", "text/event-stream", "it streamed no event. Nothing of it is kept."),
    (
        b"data: {]\n",
        "text/event-stream",
        "JSON is malformed: object keys must be strings (byte 1): it says '{]'. Nothing of it is kept.",
    ),
    (
        EVENT + b'data: {"output_ids": [5, 6], "meta_info": {"completion_tokens": 4}}\n\n',
        "text/event-stream",
        "an event of 2 ids counts 4, after events that brought 1; it neither repeats those nor goes on from them: it "
        'says \'{"output_ids": [5, 6], "meta_info": {"completion_tokens": 4}}\'. Nothing of it is kept.',
    ),
]


@pytest.mark.parametrize(("body", "content_type", "problem"), STREAMS)
async def test_a_stream_that_is_none(body: bytes, content_type: str, problem: str) -> None:
    error = await streamed(body, content_type)
    assert str(error) == f"Law 4: sglang at http://h/generate answered 200, but {problem}"
    assert (type(error), error.status, error.sent) == (ProtocolViolationError, 200, True)


async def test_a_stream_that_is_no_text_is_shown_as_far_as_it_can_be() -> None:
    error = await streamed(b"data: " + b"x" * 79 + b"\xff" + b"y" * 2500 + b"\n")
    assert error.body == "x" * 79 + "\ufffd" + "y" * 1920
    assert f"it says '{'x' * 79}\ufffd'. Nothing" in str(error)
    told = await streamed(b'data: {"error": "a\xffb"}\n')
    assert told.body == '{"error": "a\ufffdb"}'


async def test_a_stream_that_breaks_off() -> None:
    error = await streamed(EVENT)
    assert (type(error), error.sent) == (EngineConnectionError, True)
    assert str(error) == (
        "The stream of sglang at http://h/generate broke off before its end, so nothing of it is kept. Is the server "
        "still running? Its log may say why it hung up."
    )


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        ('{"message": "no", "code": 400}', 400, BadRequestError),
        ('{"message": "no", "code": 599}', 599, ServerError),
        ('{"message": "no", "code": 600}', 500, ServerError),
        ('{"message": "no", "code": 399}', 500, ServerError),
        ('{"message": "no"}', 500, ServerError),
        ('"no"', 500, ServerError),
    ],
)
async def test_an_error_in_a_stream(error: str, status: int, kind: type[BackendError]) -> None:
    found = await streamed(EVENT + f'data: {{ "error": {error}}}\n'.encode())
    assert (type(found), found.status) == (kind, status)
    assert str(found).startswith(f"sglang at http://h/generate answered {status}: no. ")
