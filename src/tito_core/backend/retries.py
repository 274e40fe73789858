"""Retries of transient failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from tito_core.backend.errors import BackendError, EngineConnectionError, ServerError, ThrottledError
from tito_core.backend.typed_values import at_least

_log = logging.getLogger(__name__)
T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
_LOGGED = 300
"""Characters of an error in a log line."""
LONGEST_WAIT_S = 60.0
"""Longest wait for a server's `Retry-After`, in seconds."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a request. Its number, from 0, becomes part of the request id."""

    number: int

    def name(self, request_id: str) -> str:
        """Return the request id of this try. SGLang refuses an id that is still running, so each retry has its own."""
        return request_id if not self.number else f"{request_id}-retry{self.number}"


class Retries:
    """Retry connection failures, 429, 503 and other 5xx; never another 4xx or a timeout.

    These are the only retries: Strands does not retry the error that is raised in the end.

    Args:
        max_attempts: Tries in all.
        sleep: Waits between them.
        may_retry: Returns whether an error is retried.
    """

    def __init__(
        self,
        max_attempts: int = 4,
        sleep: Sleep = asyncio.sleep,
        may_retry: Callable[[BaseException], bool] | None = None,
    ) -> None:
        self._may_retry = may_retry or is_transient
        self.max_attempts = at_least("max_attempts", max_attempts, 1)
        self._sleep = sleep

    async def __call__(self, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """Call `work`, and retry transient failures.

        Raises:
            BackendError: The error of the last try.
        """
        try:
            return await work(Attempt(0))
        except BackendError as error:
            if not self._may_retry(error):
                raise
            first = error
        tries = AsyncRetrying(  # made only now: most requests never need it
            retry=retry_if_exception(self._may_retry),
            stop=stop_after_attempt(self.max_attempts),
            wait=_wait,
            sleep=self._sleep,
            before_sleep=self._log_retry,
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
            del first  # its traceback refers to this frame
        raise AssertionError("tenacity re-raises the last error")

    def _log_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait_s = state.next_action.sleep if state.next_action else 0.0
        _log.warning(
            "try %d of %d failed, retrying in %.2f s: request %s: %s: %s",
            state.attempt_number,
            self.max_attempts,
            wait_s,
            getattr(error, "request_id", None) or "without an id",
            type(error).__name__,
            " ".join(str(error).split())[:_LOGGED],
        )


def is_transient(error: BaseException) -> bool:
    """Return whether a failure is transient and the request can be retried."""
    return isinstance(error, EngineConnectionError | ThrottledError | ServerError) and not error.was_streamed


_backoff = wait_exponential(multiplier=0.25, max=8.0) + wait_random(0.0, 0.25)


def _wait(state: RetryCallState) -> float:
    """Return the seconds to wait: the server's `Retry-After`, else exponential backoff with jitter."""
    error = state.outcome.exception() if state.outcome else None
    retry_after_s = error.retry_after_s if isinstance(error, ThrottledError) else None
    return _backoff(state) if retry_after_s is None else min(max(retry_after_s, 0.0), LONGEST_WAIT_S)
