"""Generate a turn's answer until the agent's cancel signal or the timeout, and share the event loop among turns."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from tito_core.backend.errors import EngineTimeoutError
from tito_core.backend.protocol import Backend, OnChunk, TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.resume import generate_resuming
from tito_core.settings import Settings

T = TypeVar("T")


class CancelledBySignal(Exception):
    """The agent's cancel signal was set before the answer was complete."""


def generate_answer(
    backend: Backend,
    request: TokenRequest,
    cancel: threading.Event | None,
    settings: Settings,
    on_chunk: OnChunk | None = None,
) -> Coroutine[Any, Any, TokenResponse]:
    """Generate a turn's answer. When it raises or is cancelled, the engine's request has been aborted.

    Args:
        backend: The engine's backend.
        request: The request.
        cancel: The agent's cancel signal, or None.
        settings: The turn's timeout, and how to continue after an abort.
        on_chunk: Called with each chunk as it arrives; see `Backend.generate`.

    Raises:
        CancelledBySignal: The signal was set first.
        EngineTimeoutError: `turn_timeout_s` passed first.
        BackendError: The engine failed.
    """
    work = partial(generate_resuming, backend, request, settings.on_abort, on_chunk)
    return within_limits(work, backend, request, cancel, settings)


async def within_limits(
    work: Callable[[], Awaitable[T]],
    backend: Backend,
    request: TokenRequest,
    cancel: threading.Event | None,
    settings: Settings,
) -> T:
    """Await a part of a turn until the signal or the timeout ends it; arguments and errors as of `generate_answer`."""
    timeout_s = settings.turn_timeout_s
    if cancel is None and timeout_s is None:
        return await work()
    if cancel is not None and cancel.is_set():
        raise CancelledBySignal
    if cancelling():
        await asyncio.sleep(0)  # deliver a pending cancellation first, or the limit would take it for its own
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            with CancelWatch(limit, cancel):
                return await work()
    except Exception as error:
        if not limit.expired():
            raise
        # The backend may raise anything when it is cancelled; the reason is the signal or the timeout.
        if timeout_s is None or (cancel is not None and cancel.is_set()):
            raise CancelledBySignal from _cause(error)
        raise EngineTimeoutError(
            f"{backend.name} did not complete the turn within turn_timeout_s={timeout_s:g}, which includes pauses, "
            "retries and resumed parts. The request was aborted. Raise turn_timeout_s or lower max_new_tokens.",
            backend=backend.name,
            request_id=request.request_id,
        ) from _cause(error)
    finally:
        del limit  # it refers to the task, whose error refers to this frame


async def stream_answer(
    backend: Backend, request: TokenRequest, cancel: threading.Event | None, settings: Settings
) -> AsyncGenerator[TokenChunk | TokenResponse]:
    """Generate a turn's answer as `generate_answer` does. Yield its chunks as they arrive, then the whole response."""
    chunks, news = deque[TokenChunk](), asyncio.Event()

    def show(chunk: TokenChunk) -> None:
        chunks.append(chunk)
        news.set()

    task = asyncio.ensure_future(generate_answer(backend, request, cancel, settings, show))
    task.add_done_callback(lambda _: news.set())
    try:
        async with _CancelOnExit(task):
            while chunks or not task.done():
                if chunks:
                    yield chunks.popleft()
                else:
                    await news.wait()
                    news.clear()
            yield task.result()
    finally:
        del task  # its error refers to this frame: break the cycle, so that a failed turn is freed at once


def _cause(error: Exception) -> Exception | None:
    """Return the error as a cause, or None for a TimeoutError, which adds nothing."""
    if not isinstance(error, TimeoutError):
        return error
    error.with_traceback(None)  # its frames refer to the limit
    return None


class _CancelOnExit:
    """Cancel a task when the block that waits for it is left early."""

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    async def __aenter__(self) -> None:
        """Do nothing."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the task unless it is done, and wait until it has sent its abort."""
        if self._task.done():
            return
        if isinstance(error, GeneratorExit):  # it cannot wait; if its loop runs on, the task sends its abort
            with contextlib.suppress(RuntimeError):
                self._task.cancel()
            return
        self._task.cancel()
        await asyncio.wait({self._task})  # unlike `await task`, a second cancellation of this task ends the wait


CANCEL_POLL_S = 0.05
"""Seconds between polls of the agents' cancel signals, `threading.Event`s that cannot be awaited."""


class CancelWatch:
    """Let a signal end the block of an `asyncio.timeout`, as its time would. Enter it inside that block.

    All rollouts of a loop share one timer, and there is no task besides the caller's. A task that was cancelled by
    other code, or by the timeout, is left alone: it is sending its abort.

    Args:
        limit: The block's timeout.
        signal: The agent's cancel signal, or None.
    """

    __slots__ = ("_before", "_limit", "_signal", "_task", "_watches")

    def __init__(self, limit: asyncio.Timeout, signal: threading.Event | None) -> None:
        self._limit = limit
        self._signal = signal
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        self._watches: _Watches = {}

    def __enter__(self) -> None:
        if self._signal is not None:
            self._task = asyncio.current_task()
            self._before = cancelling(self._task)
            self._watches = _watches_of(asyncio.get_running_loop())
            self._watches[self] = self._signal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watches.pop(self, None)
        self._task = None

    def end(self, now: float) -> bool:
        """End the block, as if its time were up. Return False when its task was cancelled by other code."""
        if cancelling(self._task) != self._before:
            return False
        self._limit.reschedule(now)
        return True


def cancelling(task: asyncio.Task[Any] | None = None) -> int:
    """Return a task's pending cancellations (`Task.cancelling`); of the running task by default."""
    task = asyncio.current_task() if task is None else task
    return 0 if task is None else task.cancelling()


_Watches = dict["CancelWatch", threading.Event]
_watches: dict[asyncio.AbstractEventLoop, _Watches] = {}


def _watches_of(loop: asyncio.AbstractEventLoop) -> _Watches:
    watches = _watches.get(loop)
    if watches is None:
        for closed in [other for other in list(_watches) if other.is_closed()]:
            _watches.pop(closed, None)
        watches = _watches[loop] = {}
        loop.call_later(CANCEL_POLL_S, _poll, loop)
    return watches


def _poll(loop: asyncio.AbstractEventLoop) -> None:
    watches = _watches[loop]
    for watch, signal in list(watches.items()):
        if signal.is_set() and watch.end(loop.time()):
            del watches[watch]
    if watches:
        loop.call_later(CANCEL_POLL_S, _poll, loop)
    else:
        del _watches[loop]


ROUND = 8
"""Maximum pieces of work in one round of an event loop. More would delay other tasks; fewer would cost more rounds."""
LONGEST_S = 0.005
"""Time of a round, in seconds, above which later rounds run fewer pieces. It includes the agent's own work around each
piece, such as writing a long history to a trace. A task that sleeps wakes after two or three rounds."""


async def yield_to_loop() -> None:
    """Wait for a later round of the event loop if this round has reached its limit; else return at once.

    Preparing a turn and reading its answer take a millisecond or two of CPU each. When many turns are due at once, the
    event loop would otherwise run all of them before any timer, health check or new connection.

    Tasks that wait continue in the order in which they called this function.
    """
    loop = asyncio.get_running_loop()
    current = _rounds.get(loop)
    if current is None:
        for closed in [other for other in list(_rounds) if other.is_closed()]:
            _rounds.pop(closed, None)
        current = _rounds[loop] = _Round()
    if current.done < current.limit:
        current.done += 1
        if current.done == current.limit and current.began is None:
            loop.call_soon(_next_round, loop)
        return
    future: asyncio.Future[None] = loop.create_future()
    current.waiting.append(future)
    await future


@dataclass(slots=True)
class _Round:
    """A round of one event loop, or several in which few pieces came: their end is not worth a callback.

    Attributes:
        began: The loop's time at its start, if that is known: pieces of the round before are waiting.
        limit: Maximum pieces of work.
        done: Pieces of work so far.
        waiting: Later pieces, first come first served.
    """

    began: float | None = None
    limit: int = ROUND
    done: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def end(self, now: float) -> None:
        """Set the next round's limit: the pieces that would have fitted into `LONGEST_S`, or one more than before."""
        took = 0.0 if self.began is None else now - self.began
        if took > LONGEST_S:
            self.limit = max(1, int(self.done * LONGEST_S / took))
        elif self.limit < ROUND:
            self.limit += 1
        self.began, self.done = now, 0


_rounds: dict[asyncio.AbstractEventLoop, _Round] = {}


def _next_round(loop: asyncio.AbstractEventLoop) -> None:
    current = _rounds[loop]
    current.end(loop.time())
    while current.waiting and current.done < current.limit:
        future = current.waiting.popleft()
        if not future.done():  # else its turn was cancelled
            future.set_result(None)
            current.done += 1
    if current.done:
        loop.call_soon(_next_round, loop)
    else:
        del _rounds[loop]
