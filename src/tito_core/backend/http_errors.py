"""What came instead of a 200 -> a typed error with the server's own words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tito_core.backend.connection_errors import wants_tls
from tito_core.backend.errors import (
    OUT_OF_VOCABULARY,
    UNREADABLE,
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
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
_OUT_OF_VOCABULARY = re.compile(r"\bout of vocabulary\b", re.IGNORECASE)
"""How vLLM (0.30, 0.32) refuses a prompt's id; it does not die of one as SGLang does."""
_WANTS_TLS = re.compile(r"HTTP request (was sent )?to (an )?HTTPS (port|server)", re.IGNORECASE)
"""How nginx and Go answer a plain HTTP request on a port for TLS."""
_GIVE_THE_KEY = "Give the server's key as api_key or in TITO_API_KEY."
_CONNECT_AGAIN = (
    "If the server answered there before, it may have been restarted without this endpoint: connect again with a new "
    "Policy or model."
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
    """Return the error for an answer that is not a 200."""
    if status == 400 and not body.lstrip().startswith("{") and _WANTS_TLS.search(body):  # no echo of a prompt
        return wants_tls(backend, url, request_id)
    said = " ".join(server_words(body).split())[:_LONGEST_WORDS] or f"HTTP {status} without a message"
    if 300 <= status < 400 and "location" in headers:
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
    if status == 401:
        return AuthenticationError, _GIVE_THE_KEY
    if status == 403:
        return AuthenticationError, f"{_GIVE_THE_KEY} {_CONNECT_AGAIN}"
    if status in (429, 503):
        return ThrottledError, "The server is overloaded; lower the concurrency or add servers."
    if 400 <= status < 500 and _TOO_LONG.search(said):
        return ContextLengthError, "Shorten the history or start the server with a longer context."
    if 400 <= status < 500 and _OUT_OF_VOCABULARY.search(said):
        return BadRequestError, OUT_OF_VOCABULARY
    if status == 404:
        right = "Check the model's name, the address, and that this is the right kind of server."
        return BadRequestError, f"{right} {_CONNECT_AGAIN}"
    if 400 <= status < 500:
        return BadRequestError, "The request is not sent again; mend what the server names."
    if status >= 500:
        return ServerError, "The server failed by itself; its log says more."
    return (
        ProtocolViolationError,
        "Only a 200 is an answer, and redirects are not followed: give the server's own address.",
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
