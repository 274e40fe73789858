"""What came instead of a 200 -> a typed error with the server's own words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import httpx
import msgspec

from tito_core.backend.errors import (
    UNREADABLE,
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    EngineConnectionError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
)

# Both engines speak of too long a prompt in these words (vLLM 0.32, SGLang 0.5.23); "must not exceed" of a sampling
# parameter is something else, so it has to be the context's length.
_TOO_LONG = re.compile(
    r"maximum (context|model) length|longer than the model's context length|exceeds the maximum allowed length",
    re.IGNORECASE,
)
_LONGEST_WORDS = 1000
"""Characters of a server's message that an error's sentence repeats; its `body` holds more."""


def error_from_status(
    backend: str,
    status: int,
    body: str,
    headers: Mapping[str, str],
    *,
    url: str,
    request_id: str | None,
) -> BackendError:
    """Give the error for an answer that is not a 200."""
    said = " ".join(server_words(body).split())[:_LONGEST_WORDS] or f"HTTP {status} without a message"
    if "location" in headers:
        said = f"a redirect to {headers['location']}"
    kind, advice = _kind(status, said)
    error = kind(
        f"{backend} at {url} answered {status}: {said.rstrip('.')}. {advice}",
        backend=backend,
        status=status,
        body=body,
        request_id=request_id,
    )
    if isinstance(error, ThrottledError):
        error.retry_after_s = _seconds(headers.get("retry-after"))
    return error


def _kind(status: int, said: str) -> tuple[type[BackendError], str]:
    if status in (401, 403):
        return AuthenticationError, "Give the server's key as api_key or in TITO_API_KEY."
    if status in (429, 503):
        return ThrottledError, "The server is overloaded; lower the concurrency or add servers."
    if 400 <= status < 500 and _TOO_LONG.search(said):
        return ContextLengthError, "Shorten the history or start the server with a longer context."
    if status == 404:
        return BadRequestError, "Check the model's name, the address, and that this is the right kind of server."
    if 400 <= status < 500:
        return BadRequestError, "The request is not sent again; mend what the server names."
    if status >= 500:
        return ServerError, "The server failed by itself; its log says more."
    return (
        ProtocolViolationError,
        "Only a 200 is an answer, and redirects are not followed: give the server's own address.",
    )


def error_from_failure(
    backend: str, failure: Exception, *, url: str, connect_timeout_s: float, request_id: str | None
) -> BackendError:
    """Give the error for a request that got no whole answer: nobody there, a broken connection, or no HTTP at all."""
    # httpx-aiohttp calls a refused connection a timeout, so look at what aiohttp itself raised.
    cause = failure if isinstance(failure, aiohttp.ClientError) else failure.__cause__ or failure
    said = str(cause) or type(cause).__name__
    if isinstance(cause, aiohttp.ClientResponseError):
        return ProtocolViolationError(
            f"What answers at {url} speaks no HTTP ({' '.join(cause.message.split())}). Are host and port {backend}'s?",
            backend=backend,
            request_id=request_id,
        )
    if isinstance(cause, aiohttp.ConnectionTimeoutError | httpx.ConnectTimeout):
        said = f"no answer within {connect_timeout_s:g} s"
    elif isinstance(cause, aiohttp.ClientConnectorError):
        said = cause.strerror or said
    elif not isinstance(cause, httpx.ConnectError):
        error = EngineConnectionError(
            f"The connection to {backend} at {url} broke before its answer was whole ({said}). "
            "Is the server still running? Its log may say why it hung up.",
            backend=backend,
            request_id=request_id,
        )
        error.sent = True
        return error
    return EngineConnectionError(
        f"No connection to {backend} at {url} ({said}). Is the server running, and are host and port right?",
        backend=backend,
        request_id=request_id,
    )


def server_words(body: str) -> str:
    """Find the message in the shapes that both engines use.

    These are {"error": {"message"}}, {"error": text}, {"message"} and {"detail"}. A body that is not JSON (a proxy's
    page) is given as it is, shortened.
    """
    try:
        decoded: Any = msgspec.json.decode(body)
    except UNREADABLE:
        return body.strip()[:200]
    if not isinstance(decoded, dict):
        return body[:200]
    error = decoded.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    words = error or decoded.get("message") or decoded.get("detail")
    return words if isinstance(words, str) else body[:200]


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        return None  # an HTTP date: our own backoff serves as well
    return seconds if math.isfinite(seconds) else None
