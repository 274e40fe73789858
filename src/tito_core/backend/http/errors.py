"""What came instead of a whole 200 -> a typed error: how its connection failed, or the server's own words."""

from __future__ import annotations

import asyncio
import errno
import math
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tito_core.backend.errors import (
    OUT_OF_VOCABULARY,
    UNREADABLE,
    AnswerTooLargeError,
    AuthenticationError,
    BackendError,
    BadRequestError,
    ConnectionFailure,
    ContextLengthError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.http.bodies import BodyTooLargeError, UndecodableBodyError

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_REFUSED = (errno.ECONNREFUSED, errno.ENOENT, errno.EACCES, errno.EPERM)
"""The last three are of a Unix socket's path."""
_RESET = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
_REMEDIES: dict[ConnectionFailure, str] = {
    "refused": "Is the server running, and are host and port right?",
    "unknown-host": "Check the host's name in the address, and this machine's DNS.",
    "unreachable": "Check the address and the network between this machine and the server.",
    "never-opened": "A firewall may drop the packets, or the server accepts no more connections; raise "
    "connect_timeout_s to wait longer.",
    "closed": "Is the server running, and are host and port right?",
    "reset": "Is the server running, and are host and port right?",
}


def error_from_failure(
    backend: str, failure: Exception, *, url: str, connect_timeout_s: float, request_id: str | None
) -> BackendError:
    """Return the error for a request that got no whole answer: none at all, a broken one, or one that is not HTTP."""
    if isinstance(failure, BodyTooLargeError | UndecodableBodyError):
        return _unreadable(backend, failure, url, request_id)
    if isinstance(failure, aiohttp.ClientResponseError):
        return ProtocolViolationError(
            f"What answers at {url} does not speak HTTP ({_one_line(failure.message)}). Are host and port {backend}'s?",
            backend=backend,
            request_id=request_id,
        )
    if isinstance(failure, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return _not_opened(backend, failure, url, connect_timeout_s, request_id)
    if isinstance(failure, TimeoutError):
        return EngineTimeoutError(
            f"{backend} at {url} did not answer within the time that its http_transport allows "
            f"({type(failure).__name__}). Raise the timeouts of http_transport, or leave them to timeout_s.",
            backend=backend,
            request_id=request_id,
        )
    reset = any(getattr(one, "errno", None) in _RESET for one in _chain(failure)) or "ConnectionReset" in str(failure)
    said = _one_line(str(failure)) or type(failure).__name__
    if isinstance(failure, aiohttp.ServerDisconnectedError):  # which may say all of a head that is cut
        said = "in or before its head"
    error = EngineConnectionError(
        f"The connection to {backend} at {url} was {'reset' if reset else 'closed'} before its answer was whole "
        f"({said}). Is the server still running? Its log may say why it hung up.",
        backend=backend,
        request_id=request_id,
    )
    error.sent = True
    error.reason = "reset" if reset else "closed"
    return error


def _not_opened(
    backend: str, failure: Exception, url: str, connect_timeout_s: float, request_id: str | None
) -> EngineConnectionError:
    reason, what = _why_not_opened(failure, connect_timeout_s)
    if reason == "tls":
        remedy = _tls_remedy(failure, url)
    elif reason in ("closed", "reset") and url.startswith("https:"):
        remedy = f"If the server speaks plain HTTP, give its address as {_with_scheme(url, 'http')!r}."
    else:
        remedy = _REMEDIES[reason]
    error = EngineConnectionError(
        f"No connection to {backend} at {url} ({what}). {remedy}", backend=backend, request_id=request_id
    )
    error.reason = reason
    return error


def _why_not_opened(failure: Exception, connect_timeout_s: float) -> tuple[ConnectionFailure, str]:
    chain = list(_chain(failure))
    numbers = {getattr(one, "errno", None) for one in chain}
    said = _one_line(getattr(failure, "strerror", None) or str(failure) or type(failure).__name__)
    if any(isinstance(one, ssl.SSLError) for one in chain):
        return "tls", _one_line(str(next(one for one in chain if isinstance(one, ssl.SSLError))))
    if any(isinstance(one, aiohttp.ClientConnectorDNSError | socket.gaierror) for one in chain):
        return "unknown-host", f"the host's name is unknown: {said}"
    if numbers & set(_REFUSED):
        return "refused", f"it was refused: {said}"
    if numbers & set(_NO_ROUTE):
        return "unreachable", f"no route to the host: {said}"
    if isinstance(failure, aiohttp.ConnectionTimeoutError):
        return "never-opened", f"it did not open within {connect_timeout_s:g} s"
    if any(isinstance(one, ConnectionError) for one in chain):
        return "reset", "it was closed while it was opened"
    return "closed", said


def _tls_remedy(failure: Exception, url: str) -> str:
    if isinstance(failure, aiohttp.ClientConnectorCertificateError) or "CERTIFICATE_VERIFY_FAILED" in str(failure):
        return (
            "Give the server a certificate that a known authority signed for this host, or the backend an "
            "http_transport that trusts its own, such as lambda: Pool(tls=...) of tito_core.backend.http.connections."
        )
    if any(word in str(failure) for word in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")):
        return f"The server speaks plain HTTP there: give its address as {_with_scheme(url, 'http')!r}."
    return "Server and client do not agree on a version of TLS or a cipher; the server's log may say more."


def wants_tls(backend: str, url: str, request_id: str | None) -> EngineConnectionError:
    """Return the error for a plain HTTP request to a server that speaks TLS."""
    error = EngineConnectionError(
        f"The server at {url} speaks TLS, and the address says http: give it as {_with_scheme(url, 'https')!r}.",
        backend=backend,
        request_id=request_id,
    )
    error.reason = "tls"
    return error


async def speaks_tls(url: str, within_s: float) -> bool:
    """Return whether a server answers a TLS handshake at an address that says http."""
    where = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent on it
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(where.hostname, where.port or 80, ssl=context)
    except (OSError, ValueError):
        return False
    writer.transport.abort()
    return True


def _unreadable(
    backend: str, failure: BodyTooLargeError | UndecodableBodyError, url: str, request_id: str | None
) -> BackendError:
    if isinstance(failure, UndecodableBodyError):
        undecodable = ProtocolViolationError(
            f"{backend} at {url} answered 200, but its body cannot be read: {failure}. Is there a proxy that "
            "compresses answers? Give the server's own address.",
            backend=backend,
            status=200,
            request_id=request_id,
        )
        undecodable.sent = True
        return undecodable
    error = AnswerTooLargeError(
        f"{backend} at {url} answered more than {failure.limit:,} bytes, the bound for this request, so reading "
        "stopped. Check that this is the right server, and turn off outputs that it adds unasked.",
        backend=backend,
        status=200,
        request_id=request_id,
    )
    error.limit = failure.limit
    error.sent = True
    return error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was made of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__


def _with_scheme(url: str, scheme: str) -> str:
    return f"{scheme}://{urlsplit(url).netloc}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Both engines speak of too long a prompt in these words (vLLM 0.32, SGLang 0.5.23); "must not exceed" of a sampling
# parameter is something else, so it has to be the context's length.
_TOO_LONG = re.compile(
    r"maximum (context|model) length|longer than the model's context length|exceeds the maximum allowed length|"
    r"exceeds the maximum number of tokens|exceeds the KV memory budget",
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
        return BadRequestError, "Fix the field that the server reports; this request is not retried."
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
