"""HTTP to an engine: one pooled client per event loop, typed errors, bounded retries.

httpx's API on an aiohttp transport: at high concurrency httpx's own pool costs many times the CPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from tito_core.backend.errors import (
    BackendError,
    EngineConnectionError,
    EngineTimeoutError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.http_errors import error_from_status

HttpTransportFactory = Callable[[], httpx.AsyncBaseTransport]
API_KEY_VARIABLE = "TITO_API_KEY"
LONGEST_WAIT_S = 60.0
"""Bound on what a server's `Retry-After` can make us wait, in seconds."""


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


class EngineHttp:
    """Sends requests to one server. Stateless but for its connections; threads and event loops may share it.

    Args:
        backend: Name for errors.
        base_url: Such as "http://localhost:8000".
        api_key: Sent as a bearer token; from the environment variable TITO_API_KEY when None. Never shown.
        timeout_s: Longest wait for an answer, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        max_attempts: Tries for connection failures, 429, 503 and other 5xx; never for another 4xx.
        http_transport: Makes the httpx transport; aiohttp's by default. Scripted engines put theirs here.
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
    ) -> None:
        url = httpx.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise EngineConnectionError(
                f"{base_url!r} is no server address: give one like 'http://localhost:8000'.", backend=backend
            )
        self.backend = backend
        self.base_url = str(url).rstrip("/")
        self.timeout_s = timeout_s
        self._timeout = httpx.Timeout(timeout_s, connect=connect_timeout_s, pool=None)
        self._max_attempts = max_attempts
        self._api_key = api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE)
        self._factory = http_transport or _aiohttp_transport
        self._clients: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[AsyncGenerator[httpx.AsyncClient], httpx.AsyncClient]
        ] = WeakKeyDictionary()

    async def get(self, path: str, *, request_id: str | None = None) -> bytes:
        """GET with retries; the body of a 200."""
        return await self.send(lambda attempt: HttpRequest(path), method="GET", request_id=request_id)

    async def send(
        self,
        prepare: Callable[[Attempt], HttpRequest],
        *,
        method: str = "POST",
        request_id: str | None = None,
    ) -> bytes:
        """Send a request, built anew for each try; give the body of a 200.

        Raises:
            BackendError: The subclass tells what happened; after the last try for what is retried.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((EngineConnectionError, ThrottledError, ServerError)),
            stop=stop_after_attempt(self._max_attempts),
            wait=_wait,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                number = attempt.retry_state.attempt_number - 1
                return await self.send_once(prepare(Attempt(number)), method=method, request_id=request_id)
        raise AssertionError("tenacity re-raises the last error")

    async def send_once(self, request: HttpRequest, *, method: str = "POST", request_id: str | None = None) -> bytes:
        """Send one request without retries; give the body of a 200."""
        client = await self._client()
        headers = {"Content-Type": "application/json", **request.headers}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            response = await client.request(
                method, self.base_url + request.path, content=request.body, headers=headers, timeout=self._timeout
            )
        except httpx.HTTPError as error:
            raise self._connection_error(error, request_id) from error
        if response.status_code == 200:
            return response.content
        raise error_from_status(
            self.backend,
            response.status_code,
            response.text,
            response.headers,
            url=self.base_url + request.path,
            request_id=request_id,
        )

    async def aclose(self) -> None:
        """Close the running loop's client. Loops that end close theirs by themselves."""
        held = self._clients.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[0].aclose()

    async def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        held = self._clients.get(loop)
        if held is None:
            holder = self._hold_client()
            held = (holder, await anext(holder))
            self._clients[loop] = held
        return held[1]

    async def _hold_client(self) -> AsyncGenerator[httpx.AsyncClient]:
        # The loop closes its suspended async generators when it ends, and with this one the connections.
        client = httpx.AsyncClient(transport=self._factory(), trust_env=False, follow_redirects=False)
        try:
            yield client
        finally:
            await client.aclose()

    def _connection_error(self, error: httpx.HTTPError, request_id: str | None) -> BackendError:
        said = str(error) or type(error).__name__
        # httpx-aiohttp reports a refused connection as ConnectTimeout, so look at what aiohttp itself raised.
        refused = isinstance(error.__cause__, aiohttp.ClientConnectionError) and not isinstance(
            error.__cause__, aiohttp.ServerTimeoutError
        )
        if isinstance(error, httpx.TimeoutException) and not refused:
            return EngineTimeoutError(
                f"{self.backend} at {self.base_url} did not answer within {self.timeout_s:g} s. "
                "The request was given up and aborted on the server; raise timeout_s if answers take longer.",
                backend=self.backend,
                request_id=request_id,
            )
        return EngineConnectionError(
            f"No connection to {self.backend} at {self.base_url} ({said}). Is the server running, "
            "and are host and port right?",
            backend=self.backend,
            request_id=request_id,
        )


def _aiohttp_transport() -> httpx.AsyncBaseTransport:
    return AiohttpTransport(trust_env=False, limits=httpx.Limits(max_connections=None), retries=0)


_backoff = wait_exponential_jitter(multiplier=0.25, max=8.0, jitter=0.25)


def _wait(state: RetryCallState) -> float:
    """Wait what the server asked for (`Retry-After`), else exponentially longer with jitter."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, ThrottledError) else None
    return _backoff(state) if asked is None else min(max(asked, 0.0), LONGEST_WAIT_S)
