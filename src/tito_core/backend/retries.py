"""Send a request again after a transient failure, for as long as the patience lasts.

Retried is what passes: a server that is away, busy or paused. Another 4xx or a timeout is never retried. These are the
only retries: Strands does not retry the error that is raised in the end.

A damaged answer is a fault too. A probe, of which no token is kept, is sent again; a turn is not, as that would select
the answers that are not damaged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tito_core.backend.errors import (
    BackendError,
    DamagedAnswerError,
    EngineConnectionError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.values import positive_seconds, seconds_or_zero

_log = logging.getLogger(__name__)
T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
Clock = Callable[[], float]
PATIENCE_S = 60.0
"""Default of `patience_s`: how long a server may be away, from a request's first failure, in seconds."""
TIMEOUT_S = 600.0
"""Default of `timeout_s`: the longest wait for an answer, and for a paused server, in seconds."""
ABORT_WITHIN_S = 5.0
"""Longest time for the abort of one request, in seconds."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 2.0
"""Waits double from the first to the longest; each is lengthened by up to its own length at random."""
_SERVER_ERRORS = 3
"""How often a request is sent again after a 500 or a damaged answer: the request may be the cause, not the server."""
_LOGGED = 300
"""Characters of an error in a log line."""


@dataclass(slots=True)
class Failures:
    """The failures of one request so far.

    Attributes:
        probe: Whether the answer only tells something of the server, so that a damaged one is sent again.
        count: Number of failed tries.
        server_errors: How many of them were a 500 or a damaged answer.
        away_s: Seconds of patience used: since the first failure, without pauses.
        paused_s: Seconds for which the server was paused.
        wait_s: The wait before the next try, in seconds.
        last: When the last try failed, and whether the server was paused; None before.
    """

    probe: bool = False
    count: int = 0
    server_errors: int = 0
    away_s: float = 0.0
    paused_s: float = 0.0
    wait_s: float = 0.0
    last: tuple[float, bool] | None = None

    def add(self, error: BackendError, now: float) -> None:
        """Count a failure at the time `now`. A try takes time too, such as one that finds no connection."""
        if self.last is not None:
            at, was_paused = self.last
            passed = max(now - at, self.wait_s)
            if was_paused:
                self.paused_s += passed
            else:
                self.away_s += passed
        self.count += 1
        # A gateway that lost the server says nothing of a request.
        lost = isinstance(error, ServerError) and error.sent
        self.server_errors += isinstance(error, ServerError | DamagedAnswerError) and not lost
        self.last = (now, is_paused(error))


class Retries:
    """Decides after each failure of a request whether it is sent again, and when.

    Args:
        patience_s: Seconds from the first failure until the last try; 0 for one try. A pause uses none of it.
        pause_s: Longest time to wait for a paused server, in seconds.
        sleep: Waits between tries.
        clock: Returns seconds.
    """

    def __init__(
        self,
        patience_s: float = PATIENCE_S,
        *,
        pause_s: float = TIMEOUT_S,
        sleep: Sleep = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self.patience_s = seconds_or_zero("patience_s", patience_s)
        self.pause_s = positive_seconds("timeout_s", pause_s)
        self.sleep = sleep
        self._clock = clock

    async def __call__(self, work: Callable[[int], Awaitable[T]], *, probe: bool = False) -> T:
        """Call `work` with the number of the try, from 0, until a try succeeds. `probe`: see `Failures`.

        Raises:
            BackendError: The error of the last try.
        """
        failures = Failures(probe)
        while True:
            try:
                return await work(failures.count)
            except BackendError as error:
                if not self.may_go_on(error, failures):
                    raise
            await self.sleep(failures.wait_s)

    def may_go_on(self, error: BackendError, failures: Failures) -> bool:
        """Count a failure; return whether there is a next try, after `failures.wait_s`."""
        failures.add(error, self._clock())
        may = is_transient(error) or (failures.probe and isinstance(error, DamagedAnswerError))
        wait_s = self.wait_s(error, failures) if may else None
        if wait_s is None:
            return False
        failures.wait_s = wait_s
        _log_retry(error, failures)
        return True

    def wait_s(self, error: BackendError, failures: Failures) -> float | None:
        """Return the seconds to wait before the next try, at least a `Retry-After`; None if there is no next try.

        The last try is made when the patience ends, so that a server has all of it to come back. A damaged answer needs
        no patience: the server is there.
        """
        patience_s = math.inf if isinstance(error, DamagedAnswerError) else self.patience_s
        left = self.pause_s - failures.paused_s if is_paused(error) else patience_s - failures.away_s
        if left <= 0 or not patience_s or failures.server_errors > _SERVER_ERRORS:
            return None
        retry_after_s = error.retry_after_s if isinstance(error, ThrottledError) else None
        return min(max(backoff_s(failures.count), retry_after_s or 0.0), left)


def is_transient(error: BackendError) -> bool:
    """Return whether a failure is transient and the request can be retried.

    An address at which no server ever answered is taken for a wrong one.
    """
    if error.was_streamed:
        return False
    if isinstance(error, EngineConnectionError):
        return error.sent or error.reached
    return isinstance(error, ThrottledError | ServerError)


def is_paused(error: BaseException) -> bool:
    """Return whether the server refused a request because it is paused."""
    return isinstance(error, ThrottledError) and error.is_pause


def backoff_s(failed: int) -> float:
    """Return the seconds to wait after a number of failed tries, with jitter."""
    return float(min(_FIRST_WAIT_S * 2.0 ** min(failed - 1, 16), _LONGEST_WAIT_S)) * random.uniform(1.0, 2.0)


def _log_retry(error: BackendError, failures: Failures) -> None:
    request = error.request_id or "without an id"
    if not is_paused(error):
        _log.warning(
            "try %d failed, retrying in %.2f s, %.1f s after the first failure: request %s: %s: %s",
            failures.count,
            failures.wait_s,
            failures.away_s,
            request,
            type(error).__name__,
            " ".join(str(error).split())[:_LOGGED],
        )
    elif not failures.paused_s:  # one line for each pause of a request
        _log.warning("%s is paused, as for new weights: request %s waits until it resumes", error.backend, request)
