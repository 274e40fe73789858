"""Typed errors for a failed connection, and for a response that is not a whole 200."""

from __future__ import annotations

import errno
import math
import re
import resource
import socket
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

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
    DamagedAnswerError,
    EngineConnectionError,
    EngineTimeoutError,
    ServerError,
    ThrottledError,
    hidden,
)
from tito_core.backend.http.body import ERROR_BYTES, BodyTooLargeError, UndecodableBodyError

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_REFUSED = (errno.ECONNREFUSED, errno.ENOENT, errno.EACCES, errno.EPERM)
"""The last three concern a Unix socket's path."""
_RESET = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_CHECK_ADDRESS = "Check that the server is running, and its host and port."
_REMEDIES: dict[ConnectionFailure, str] = {
    "refused": _CHECK_ADDRESS,
    "unknown-host": "Check the host name in the address, and this machine's DNS.",
    "unreachable": "Check the address and the network between this machine and the server.",
    "never-opened": "A firewall may drop the packets, or the server may accept no more connections. Raise "
    "connect_timeout_s to wait longer.",
    "closed": _CHECK_ADDRESS,
    "reset": _CHECK_ADDRESS,
}
_GATEWAY_TIMEOUTS = (408, 504, 524)
"""What a gateway answers when its time for an answer is over (524: Cloudflare's). The server may still be working."""
GATEWAY_FAILURES = (502, 520, 521, 522, 523)
"""What a gateway answers when its connection to the server broke or could not be opened (from 520: Cloudflare's)."""

NOT_OFFERED = (403, 404, 405, 501)
"""What servers, routers and gateways answer for a path that they do not offer. A 401 asks for a key."""


def error_from_failure(
    backend: str, failure: Exception, *, url: str, connect_timeout_s: float, request_id: str | None
) -> BackendError:
    """Return the error for a request without a whole response: none, an incomplete one, or one that is not HTTP."""
    if isinstance(failure, BodyTooLargeError | UndecodableBodyError):
        return _unreadable(backend, failure, url, request_id)
    if isinstance(failure, aiohttp.ClientResponseError):
        return DamagedAnswerError(
            f"The server at {url} does not speak HTTP ({_one_line(hidden(failure.message))}). Check host and "
            f"port of {backend}.",
            backend=backend,
            request_id=request_id,
        )
    if isinstance(failure, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return _not_opened(backend, failure, url, connect_timeout_s, request_id)
    if isinstance(failure, TimeoutError):
        return EngineTimeoutError(
            f"{backend} at {url} did not answer within the timeout of its http_transport "
            f"({type(failure).__name__}). Raise that timeout, or remove it and use timeout_s.",
            backend=backend,
            request_id=request_id,
        )
    reset = any(getattr(one, "errno", None) in _RESET for one in _chain(failure)) or "ConnectionReset" in str(failure)
    detail = _one_line(str(failure)) or type(failure).__name__
    if isinstance(failure, aiohttp.ServerDisconnectedError):  # its message may hold the whole incomplete head
        detail = "in or before its head"
    error = EngineConnectionError(
        f"The connection to {backend} at {url} was {'reset' if reset else 'closed'} before the response was complete "
        f"({detail}). Check that the server is still running, and its log.",
        backend=backend,
        request_id=request_id,
    )
    error.sent = True
    error.reason = "reset" if reset else "closed"
    return error


def _not_opened(
    backend: str, failure: Exception, url: str, connect_timeout_s: float, request_id: str | None
) -> EngineConnectionError:
    reason, detail = _why_not_opened(failure, connect_timeout_s)
    if reason == "tls":
        remedy = _tls_remedy(failure, url)
    elif reason == "no-files":
        remedy = (
            f"This process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} files and sockets: raise the "
            "limit (ulimit -n), set max_connections, or lower the concurrency."
        )
    elif reason in ("closed", "reset") and url.startswith("https:"):
        remedy = f"If the server speaks plain HTTP, use the address {with_scheme(url, 'http')!r}."
    else:
        remedy = _REMEDIES[reason] + _proxy_remark(url)
    error = EngineConnectionError(
        f"Cannot connect to {backend} at {url} ({detail}). {remedy}", backend=backend, request_id=request_id
    )
    error.reason = reason
    return error


def _why_not_opened(failure: Exception, connect_timeout_s: float) -> tuple[ConnectionFailure, str]:
    chain = list(_chain(failure))
    numbers = {getattr(one, "errno", None) for one in chain}
    detail = _one_line(getattr(failure, "strerror", None) or str(failure) or type(failure).__name__)
    if any(isinstance(one, ssl.SSLError) for one in chain):
        return "tls", _one_line(str(next(one for one in chain if isinstance(one, ssl.SSLError))))
    if any(isinstance(one, aiohttp.ClientConnectorDNSError | socket.gaierror) for one in chain):
        return "unknown-host", f"unknown host: {detail}"
    if numbers & set(_NO_FILES):
        return "no-files", detail
    if numbers & set(_REFUSED):
        return "refused", f"connection refused: {detail}"
    if numbers & set(_NO_ROUTE):
        return "unreachable", f"no route to host: {detail}"
    if isinstance(failure, aiohttp.ConnectionTimeoutError):
        return "never-opened", f"no connection within {connect_timeout_s:g} s"
    if any(isinstance(one, ConnectionError) for one in chain):
        return "reset", "closed while connecting"
    return "closed", detail


def _proxy_remark(url: str) -> str:
    """Return a sentence for users who expect the proxy of their environment to be used, or an empty string."""
    where = urlsplit(url)
    if where.scheme not in getproxies_environment() or proxy_bypass(where.netloc):
        return ""
    return f" The proxy of {where.scheme.upper()}_PROXY is not used: the connection to a server is always direct."


def _tls_remedy(failure: Exception, url: str) -> str:
    if isinstance(failure, aiohttp.ClientConnectorCertificateError) or "CERTIFICATE_VERIFY_FAILED" in str(failure):
        return (
            "Use a certificate that a known authority signed for this host; or name the file of your own authority in "
            "the environment variable SSL_CERT_FILE; or pass an http_transport that trusts it: lambda: "
            "ConnectionPool(tls=...), from tito_core.backend.http.client."
        )
    if any(word in str(failure) for word in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL")):
        return f"The server speaks plain HTTP: use the address {with_scheme(url, 'http')!r}."
    return "Server and client do not share a TLS version or cipher. Check the server's log."


def _wants_tls(backend: str, url: str, request_id: str | None) -> EngineConnectionError:
    """Return the error for a plain HTTP request to a server that says that it speaks TLS."""
    error = EngineConnectionError(
        f"The server at {url} speaks TLS: use the address {with_scheme(url, 'https')!r}.",
        backend=backend,
        request_id=request_id,
    )
    error.reason = "tls"
    error.reached = False  # the address will not become right
    return error


def _unreadable(
    backend: str, failure: BodyTooLargeError | UndecodableBodyError, url: str, request_id: str | None
) -> BackendError:
    if isinstance(failure, UndecodableBodyError):
        undecodable = DamagedAnswerError(
            f"{backend} at {url} answered 200, but its body cannot be decoded: {hidden(str(failure))}. A proxy may "
            "compress answers: use the server's own address.",
            backend=backend,
            status=200,
            request_id=request_id,
        )
        undecodable.sent = True
        return undecodable
    error = AnswerTooLargeError(
        f"{backend} at {url} answered more than {failure.limit:,} bytes, the limit for this request. Check that this "
        "is the right server, and disable outputs that it adds to every response.",
        backend=backend,
        status=200,
        request_id=request_id,
    )
    error.limit = failure.limit
    error.sent = True
    return error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__


def with_scheme(url: str, scheme: str) -> str:
    """Return the address of a URL's server under another scheme."""
    return f"{scheme}://{urlsplit(url).netloc}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


# How engines (vLLM 0.7 to 0.33, SGLang 0.4 to 0.5.23) and gateways refuse a prompt that is too long; each wording is a
# row of `tests/backend/test_error_table.py`. "must not exceed" alone may concern a sampling parameter. A server that
# derives the limit of an answer from a full context names a limit below 1, which is never sent.
_TOO_LONG = re.compile(
    r"(?<!cannot be greater than the model's )maximum (context|model) length|"
    r"longer than the model's context length|model's context length is only|too long to fit into the model|"
    r"exceeds the maximum allowed length|exceeds the maximum number of tokens|exceeds the KV memory budget|"
    r"max_(completion_)?tokens must be at least 1, got (-\d|0\b(?!\.\d))|"
    r"token count exceeds? the max|prompt is too long",
    re.IGNORECASE,
)
_OUT_OF_VOCABULARY = re.compile(r"\bout of vocabulary\b", re.IGNORECASE)
"""How vLLM (0.30, 0.32) refuses a prompt id; SGLang crashes instead."""
_WANTS_TLS = re.compile(r"HTTP request (was sent )?to (an )?HTTPS (port|server)", re.IGNORECASE)
"""How nginx and Go answer plain HTTP on a TLS port."""
_REPLAYED = re.compile(r"^Duplicate request IDs? detected: ")
"""How SGLang refuses an id that still runs (400). Each try has its own, so only a gateway can have sent it twice."""
_PAUSED = re.compile(r"\b(is|are) (currently )?paused\b", re.IGNORECASE)
"""How vLLM (from 0.33) refuses new requests between `/pause` and `/resume`, with a 503; SGLang lets them wait."""
_GIVE_THE_KEY = (
    "Pass the server's key as api_key or in TITO_API_KEY; one that a gateway wants in a header of its own, in headers."
)
_GIVE_THE_ADMIN_KEY = (
    "If the server has a key of its own for administration (--admin-api-key), pass it as admin_api_key."
)
_CONNECT_AGAIN = (
    "If the endpoint worked before, the server may have been restarted without it: connect again with a new Policy "
    "or model."
)


def error_from_status(
    backend: str,
    status: int,
    body: str,
    headers: Mapping[str, str],
    *,
    url: str,
    request_id: str | None,
    admin: bool = False,
    needs: str = "",
) -> BackendError:
    """Return the error for an answer that is not a 200. `admin` and `needs`: see `HttpRequest`."""
    if (
        status == 400 and not body.lstrip().startswith("{") and _WANTS_TLS.search(body)
    ):  # a JSON error may quote a prompt
        return _wants_tls(backend, url, request_id)
    message = " ".join(server_message(hidden(body)).split()) or f"HTTP {status} without a message"
    if 300 <= status < 400 and "location" in headers:
        message = f"a redirect to {hidden(headers['location'])}"
    kind, remedy = _kind(status, message)
    if kind is BadRequestError and status in (400, 422) and _is_cut(body, headers):
        kind, remedy = DamagedAnswerError, "The refusal is not whole: check the proxies in front of the server."
    if status == 404 and needs:
        remedy = f"Start the server with {needs}."
    error = kind(
        f"{backend} at {url} answered {status}: {message.rstrip('.')}. {remedy}",
        backend=backend,
        status=status,
        body=body,
        request_id=request_id,
    )
    if admin and isinstance(error, AuthenticationError):
        error.advise(_GIVE_THE_ADMIN_KEY)
    error.sent = status in (*_GATEWAY_TIMEOUTS, *GATEWAY_FAILURES) or _REPLAYED.match(message) is not None
    if isinstance(error, ThrottledError):
        error.retry_after_s = _seconds(headers.get("retry-after"), headers.get("date"))
        error.is_pause = status == 503 and _PAUSED.search(message) is not None
    return error


def _kind(status: int, message: str) -> tuple[type[BackendError], str]:
    if status == 401:
        return AuthenticationError, _GIVE_THE_KEY
    if status == 403:
        return AuthenticationError, f"{_GIVE_THE_KEY} {_CONNECT_AGAIN}"
    if status == 503 and _PAUSED.search(message):
        return ThrottledError, "Resume the server, or raise timeout_s if its pauses are longer."
    if status in (429, 503):
        return ThrottledError, "The server is overloaded: lower the concurrency or add servers."
    if 400 <= status < 500 and _TOO_LONG.search(message):
        return ContextLengthError, "Shorten the history or start the server with a longer context."
    if 400 <= status < 500 and _OUT_OF_VOCABULARY.search(message):
        return BadRequestError, OUT_OF_VOCABULARY
    if status in NOT_OFFERED:
        return BadRequestError, f"Check the model's name, the address and the backend. {_CONNECT_AGAIN}"
    if status == 413:
        return BadRequestError, (
            "The request is too large for the server or a gateway before it: raise its limit (client_max_body_size of "
            "nginx, 1 MB by default), or shorten the history."
        )
    if status in _GATEWAY_TIMEOUTS:
        return EngineTimeoutError, (
            "A gateway gave up waiting. The request was aborted and is not sent again, which would select short "
            "answers. Raise the gateway's timeout, lower max_new_tokens, or use stream=True, which keeps the "
            "connection busy."
        )
    if status in GATEWAY_FAILURES:
        return ServerError, "A gateway lost the server, or could not reach it: check the logs of both."
    if _REPLAYED.match(message):
        return ServerError, "A gateway sent the request twice: disable its own retries of POST requests."
    if 400 <= status < 500:
        return BadRequestError, "Fix the field that the server reports; this request is not retried."
    if status >= 500:
        return ServerError, "The server failed: check its log."
    return (
        DamagedAnswerError,
        "Only a 200 is accepted, and redirects are not followed: use the server's own address.",
    )


def server_message(body: str) -> str:
    """Return the message of an error body.

    Both engines use {"error": {"message"}}, {"error": text}, {"message"} and {"detail"}. Other bodies, such as a
    proxy's page, are shortened to 200 characters.
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
    message = error or decoded.get("message") or decoded.get("detail")
    return message if isinstance(message, str) else body[:200]


def _is_cut(body: str, headers: Mapping[str, str]) -> bool:
    """Return whether the body of an error is JSON by its label alone. What it refuses, and why, is not known then."""
    try:
        msgspec.json.decode(body)
    except UNREADABLE:
        return "json" in headers.get("content-type", "") and 0 < len(body.encode()) < ERROR_BYTES
    return False


def _seconds(header: str | None, date: str | None) -> float | None:
    """Return the seconds of a `Retry-After`, which may be an HTTP date, by the clock of the answer's own `Date`."""
    try:
        seconds = float(header) if header is not None else math.nan
    except ValueError:
        until = _time(header)
        seconds = math.nan if until is None else (until - (_time(date) or datetime.now(UTC))).total_seconds()
    return seconds if math.isfinite(seconds) else None


def _time(header: str | None) -> datetime | None:
    try:
        found = parsedate_to_datetime(header or "")
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
