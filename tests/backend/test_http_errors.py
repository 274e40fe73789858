"""Failed connections, error statuses, bodies and streams become typed errors with their values and a remedy."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from support.backends import http_to
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
from tito_core.backend.http.body import AnswerSize
from tito_core.backend.http.client import HttpResponse, ResponseBody, decoded
from tito_core.backend.http.errors import error_from_failure, error_from_status
from tito_core.backend.http.streaming import StreamReader
from tito_sglang.wire import EventAssembler

B = "sglang"
LIMIT = 1 << 20


TOO_LONG = "the maximum model length is 5"
STATUSES: list[tuple[int, str, Mapping[str, str], type[BackendError], str]] = [
    (401, "no", {}, AuthenticationError, r" 401: no\. .*TITO_API_KEY"),
    (403, "", {}, AuthenticationError, " 403: HTTP 403 without a message.*TITO_API_KEY.*connect again"),
    (429, '{"detail": "full."}', {}, ThrottledError, r" 429: full\. .*lower the concurrency"),
    (503, '{"message": "full"}', {}, ThrottledError, r" 503: full\. .*lower the concurrency"),
    (
        400,
        json.dumps({"error": {"message": TOO_LONG}}),
        {},
        ContextLengthError,
        f" 400: {TOO_LONG}.*Shorten the history",
    ),
    (404, '{"error": "no  such\\n model"}', {}, BadRequestError, r" 404: no such model\. .*connect again"),
    (400, '{"error": {"message": "a < 2"}}', {"location": "/login"}, BadRequestError, r" 400: a < 2\. .*not retried"),
    (408, "no", {}, EngineTimeoutError, " 408: no.*gateway's timeout.*stream=True"),
    (413, "<html>no", {}, BadRequestError, " 413: <html>no.*too large.*client_max_body_size"),
    (422, "no", {}, BadRequestError, " 422: no.*not retried"),
    (499, "no", {}, BadRequestError, " 499: no.*not retried"),
    (500, "no", {}, ServerError, " 500: no.*log"),
    (500, TOO_LONG, {}, ServerError, f" 500: {TOO_LONG}.*log"),
    (502, "no", {}, ServerError, " 502: no.*gateway lost the server"),
    (302, "no", {"location": "http://x"}, ProtocolViolationError, " 302: a redirect to http://x.*own address"),
]


@pytest.mark.parametrize(("status", "body", "headers", "kind", "pattern"), STATUSES)
def test_an_error_status(
    status: int, body: str, headers: Mapping[str, str], kind: type[BackendError], pattern: str
) -> None:
    error = error_from_status(B, status, body, headers, url="http://h/generate", request_id="r")
    assert type(error) is kind
    assert re.search(f"sglang at http://h/generate answered{pattern}", str(error))
    assert (error.backend, error.status, error.body, error.request_id) == (B, status, body, "r")


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


def test_retry_after() -> None:
    for header, seconds in (("7", 7.0), ("0.5", 0.5), ("soon", None), ("inf", None), (None, None)):
        headers = {} if header is None else {"retry-after": header}
        error = error_from_status(B, 429, "", headers, url="u", request_id=None)
        assert isinstance(error, ThrottledError)
        assert error.retry_after_s == seconds


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


def test_a_server_that_does_not_speak_http() -> None:
    failure = aiohttp.ClientResponseError(SimpleNamespace(real_url="x"), (), message="Bad\n status  line")
    error = error_from_failure(B, failure, url="u", connect_timeout_s=2.5, request_id="r")
    assert (type(error), error.backend, error.request_id, error.sent) == (ProtocolViolationError, B, "r", False)
    assert re.search(r"at u .*HTTP \(Bad status line\).*host and port", str(error))


DECODED: list[tuple[bytes, str, str]] = [
    (b"<html>", "text/html", "'text/html': '<html>'.*proxy"),
    (b"", "text/html", "empty"),
    (b"[" + b"1," * 50 + b'"a sekret", x]', "application/json", r"byte 113.*'1,1,.*\"a <API key>\", x\]'"),
]


@pytest.mark.parametrize(("body", "content_type", "pattern"), DECODED)
def test_a_200_that_cannot_be_decoded(body: bytes, content_type: str, pattern: str) -> None:
    http = http_to(B, "http://h", api_key="sekret")
    answer = ResponseBody(body, content_type)
    with pytest.raises(ProtocolViolationError, match=f"sglang at http://h answered 200.*{pattern}") as caught:
        decoded(http, answer, list[Any], "r")
    error = caught.value
    assert (error.backend, error.status, error.request_id) == (B, 200, "r")
    assert error.body == body.decode().replace("sekret", "<API key>")
    assert decoded(http, ResponseBody(b"[1]", ""), list[int]) == [1]
    assert decoded(http, ResponseBody(b"[1]", "application/json; charset=utf-8"), list[int]) == [1]


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
    (b"data: [DONE]\n", "text/event-stream", "no event"),
    (b"data: {]\n", "text/event-stream", r"byte 1\).*'{\]'"),
    (
        EVENT + b'data: {"output_ids": [5, 6], "meta_info": {"completion_tokens": 4}}\n\n',
        "text/event-stream",
        r"2 ids .*4 tokens after 1 .*\[5, 6\]",
    ),
]


@pytest.mark.parametrize(("body", "content_type", "pattern"), STREAMS)
async def test_an_invalid_stream(body: bytes, content_type: str, pattern: str) -> None:
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
