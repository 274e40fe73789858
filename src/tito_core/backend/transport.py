"""HTTP to an engine: one pooled client per event loop, typed errors, bounded retries.

httpx's API on an aiohttp transport: at high concurrency httpx's own pool costs many times the CPU.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from tito_core.backend import address
from tito_core.backend.clients import LoopTransports
from tito_core.backend.errors import EngineConnectionError, EngineTimeoutError, ServerError, ThrottledError
from tito_core.backend.http_errors import error_from_failure, error_from_status

T = TypeVar("T")
_MAY_PASS = (EngineConnectionError, ThrottledError, ServerError)
HttpTransportFactory = Callable[[], httpx.AsyncBaseTransport]
Sleep = Callable[[float], Awaitable[None]]
LONGEST_WAIT_S = 60.0
"""Bound on what a server's `Retry-After` can make us wait, in seconds."""
PIECE_BYTES = 2**18
"""A larger body is sent in pieces, so that the event loop is not held up; aiohttp warns of that from a mebibyte on."""
KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Both engines close theirs after 5 s, and a request must not meet that."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a request: its number from 0, which a backend works into the request id."""

    number: int

    def name(self, request_id: str) -> str:
        """Give the id of this try. SGLang refuses an id that is still running, so a retry needs its own."""
        return request_id if not self.number else f"{request_id}-retry{self.number}"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What one try sends."""

    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The body of a 200, and what it says that it is."""

    body: bytes
    content_type: str


class EngineHttp:
    """Sends requests to one server. Stateless but for its connections; threads and event loops may share it.

    Args:
        backend: Name for errors.
        base_url: Such as "http://localhost:8000".
        api_key: Sent as a bearer token; from the environment variable TITO_API_KEY when None. Never shown.
        timeout_s: Longest wait for a whole answer, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        max_attempts: Tries for connection failures, 429, 503 and other 5xx; never for another 4xx.
        http_transport: Makes the httpx transport; aiohttp's by default. Scripted engines put theirs here.
        sleep: Waits between tries.
    """

    def __init__(
        self,
        backend: str,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        max_attempts: int = 4,
        http_transport: HttpTransportFactory | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s}.")
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {max_attempts}.")
        self.backend = backend
        self.base_url = address.server_address(base_url, backend=backend)
        self.timeout_s = timeout_s
        self.connect_timeout_s = min(connect_timeout_s, timeout_s)
        self._max_attempts = max_attempts
        self._api_key = address.api_key(api_key, backend=backend)
        self._pools = LoopTransports(http_transport or _aiohttp_transport)
        self._urls: dict[str, httpx.URL] = {}
        self._sleep = sleep

    async def retrying(self, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """Do work, again while it fails in a way that may pass.

        Raises:
            BackendError: What the last try raised.
        """
        try:
            return await work(Attempt(0))
        except _MAY_PASS as error:
            first = error
        tries = AsyncRetrying(  # made only now: most requests never need it
            retry=retry_if_exception_type(_MAY_PASS),
            stop=stop_after_attempt(self._max_attempts),
            wait=_wait,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            async for attempt in tries:
                with attempt:
                    number = attempt.retry_state.attempt_number - 1
                    if not number:
                        raise first
                    return await work(Attempt(number))
        finally:
            del first  # its traceback holds this frame
        raise AssertionError("tenacity re-raises the last error")

    async def send(self, request: HttpRequest, *, method: str = "POST") -> HttpAnswer:
        """Send one request with retries; give the 200."""
        return await self.retrying(lambda attempt: self.send_once(request, method=method))

    async def send_once(
        self, request: HttpRequest, *, method: str = "POST", request_id: str | None = None
    ) -> HttpAnswer:
        """Send one request without retries; give the 200.

        Raises:
            BackendError: The subclass tells what happened.
        """
        pool = await self._pools.current()
        url = self._url(request.path)
        try:
            async with asyncio.timeout(self.timeout_s):  # of the whole answer: a slow drip never idles
                response = await _whole(pool, self._made(request, method, url))
        except TimeoutError:
            raise EngineTimeoutError(
                f"{self.backend} at {url} did not answer within {self.timeout_s:g} s. The request was given up and "
                "the server told to abort it; raise timeout_s if answers take longer.",
                backend=self.backend,
                request_id=request_id,
            ) from None
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as failure:
            raise error_from_failure(
                self.backend, failure, url=str(url), connect_timeout_s=self.connect_timeout_s, request_id=request_id
            ) from failure
        if response.status_code == 200:
            return HttpAnswer(response.content, response.headers.get("content-type", ""))
        raise error_from_status(
            self.backend,
            response.status_code,
            self.hide_key(response.text),
            response.headers,
            url=str(url),
            request_id=request_id,
        )

    def _url(self, path: str) -> httpx.URL:
        url = self._urls.get(path)
        if url is None:  # few different ones: they are a backend's own
            url = self._urls[path] = httpx.URL(self.base_url + path)
        return url

    def _made(self, request: HttpRequest, method: str, url: httpx.URL) -> httpx.Request:
        headers = {"Content-Type": "application/json", **request.headers}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        content: bytes | AsyncIterator[bytes] | None = request.body
        if request.body is not None and len(request.body) > PIECE_BYTES:
            content, headers["Content-Length"] = _pieces(request.body), str(len(request.body))
        timeout = {"connect": self.connect_timeout_s, "read": None, "write": None, "pool": None}
        return httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": timeout})

    def hide_key(self, text: str) -> str:
        """Take the API key out of what a server said."""
        if not self._api_key:
            return text
        return re.sub(rf"(?<![\w-]){re.escape(self._api_key)}(?![\w-])", "<API key>", text)

    async def aclose(self) -> None:
        """Close the running loop's client. Loops that end close theirs by themselves."""
        await self._pools.aclose()


async def _whole(pool: httpx.AsyncBaseTransport, request: httpx.Request) -> httpx.Response:
    """Send a request and read its answer whole; whatever way that ends, the connection is let go of."""
    response = await pool.handle_async_request(request)
    try:
        await response.aread()
    except BaseException:
        await response.aclose()
        raise
    return response


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)  # reads the certificates: once, not for every event loop


def _aiohttp_transport() -> httpx.AsyncBaseTransport:
    return AiohttpTransport(verify=_tls(), trust_env=False, client=_session)


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=_tls())  # 0 is no limit
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding"),  # a compressed answer costs both sides more than its bytes
    )


_backoff = wait_exponential(multiplier=0.25, max=8.0) + wait_random(0.0, 0.25)


def _wait(state: RetryCallState) -> float:
    """Wait what the server asked for (`Retry-After`), else exponentially longer with jitter."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, ThrottledError) else None
    return _backoff(state) if asked is None else min(max(asked, 0.0), LONGEST_WAIT_S)
