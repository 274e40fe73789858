"""Failed connections, error statuses, bodies and streams become typed errors with their values and a remedy."""

from __future__ import annotations

import errno
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from support.backends import http_to
from tito_core.backend import (
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
    ThrottledError,
)
from tito_core.backend.http.body import AnswerSize
from tito_core.backend.http.client import HttpResponse, decoded
from tito_core.backend.http.errors import error_from_failure, error_from_status
from tito_core.backend.http.streaming import StreamReader
from tito_sglang.wire import EventAssembler

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
