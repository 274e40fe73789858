"""Generating a turn's answer, while the agent's cancel signal and the user's deadline are watched."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

from tito_core.backend.errors import EngineTimeoutError
from tito_core.backend.protocol import Backend, OnChunk, TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.resume import generate_whole
from tito_core.settings import Settings

CANCEL_POLL_S = 0.05
"""How often agents' cancel signals, `threading.Event`s that nobody can await, are looked at."""

_Waiting = dict["Watched", threading.Event]
_waiting: dict[asyncio.AbstractEventLoop, _Waiting] = {}


class CancelledBySignal(Exception):
    """The agent's cancel signal was set while the engine was working."""


async def whole(
    backend: Backend, request: TokenRequest, cancel: threading.Event | None, settings: Settings
) -> TokenResponse:
    """Generate a turn's answer; whatever way it is lost, the engine is told to stop.

    Args:
        backend: The engine's.
        request: What is asked.
        cancel: The agent's cancel signal, or None.
        settings: How long it may take with everything, and what becomes of aborts.

    Raises:
        CancelledBySignal: The signal was set first.
        EngineTimeoutError: The time was up first.
        BackendError: The engine failed.
    """
    if cancel is not None and cancel.is_set():
        raise CancelledBySignal
    return await _within(backend, request, cancel, settings, None)


async def streamed(
    backend: Backend, request: TokenRequest, cancel: threading.Event | None, settings: Settings
) -> AsyncGenerator[TokenChunk | TokenResponse]:
    """Generate a turn's answer, as `whole` does, and yield its chunks as they come, and last the whole response."""
    if cancel is not None and cancel.is_set():
        raise CancelledBySignal
    came: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
    task = asyncio.ensure_future(_within(backend, request, cancel, settings, came.put_nowait))
    task.add_done_callback(lambda _: came.put_nowait(None))
    try:
        async with _Owned(task):
            while (chunk := await came.get()) is not None:
                yield chunk
            yield task.result()
    finally:
        del task  # whose error knows this frame: what a lost turn held is let go of at once


async def _within(
    backend: Backend,
    request: TokenRequest,
    cancel: threading.Event | None,
    settings: Settings,
    on_chunk: OnChunk | None,
) -> TokenResponse:
    """Generate until the signal is set or the time is up, which both cancel what is under way and wait for its end."""
    timeout_s = settings.turn_timeout_s
    if cancel is None and timeout_s is None:
        return await generate_whole(backend, request, settings.aborts, on_chunk)
    if cancelling():
        await asyncio.sleep(0)  # a cancellation that has yet to arrive would be taken for the limit's own
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            with Watched(limit, cancel):
                return await generate_whole(backend, request, settings.aborts, on_chunk)
    except Exception as error:
        if not limit.expired():
            raise
        # Whatever a backend makes of being cancelled, this is why it was.
        if timeout_s is None or (cancel is not None and cancel.is_set()):
            raise CancelledBySignal from _unless_time(error)
        raise EngineTimeoutError(
            f"{backend.name} did not answer the turn within turn_timeout_s={timeout_s:g}, whatever took the time "
            "(an answer, a pause, retries, resumed parts). The turn was given up, and the server told to abort it.",
            backend=backend.name,
            request_id=request.request_id,
        ) from _unless_time(error)
    finally:
        del limit  # which knows the task, whose error knows this frame


def _unless_time(error: Exception) -> Exception | None:
    """Return the cause of a turn's end that says more than that it did."""
    if not isinstance(error, TimeoutError):
        return error
    error.with_traceback(None)  # where the limit is, too
    return None


class _Owned:
    """A task that is not left behind by who waits for it."""

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    async def __aenter__(self) -> None:
        """Begin to wait."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel it if it is not done, and wait until it has seen to its abort."""
        if self._task.done():
            return
        if isinstance(error, GeneratorExit):  # who is closed cannot wait: it aborts by itself, if its loop still runs
            with contextlib.suppress(RuntimeError):
                self._task.cancel()
            return
        self._task.cancel()
        await asyncio.wait({self._task})  # unlike `await task`, lets a second cancellation of ours through


class Watched:
    """Lets a signal end the block of an `asyncio.timeout`, as its time would. Enter it inside that block.

    It takes a loop of thousands of rollouts one timer, not one each, and no task beside the caller's. A task that
    somebody else has cancelled meanwhile, or its time, is left alone: it is seeing to its abort.

    Args:
        limit: The block's.
        signal: An agent's, or None.
    """

    __slots__ = ("_before", "_limit", "_signal", "_task", "_waiting")

    def __init__(self, limit: asyncio.Timeout, signal: threading.Event | None) -> None:
        self._limit = limit
        self._signal = signal
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        self._waiting: _Waiting = {}

    def __enter__(self) -> None:
        if self._signal is not None:
            self._task = asyncio.current_task()
            self._before = cancelling(self._task)
            self._waiting = _of(asyncio.get_running_loop())
            self._waiting[self] = self._signal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.pop(self, None)
        self._task = None

    def end(self, now: float) -> bool:
        """Let the block's time be up; tell whether it is."""
        if cancelling(self._task) != self._before:
            return False
        self._limit.reschedule(now)
        return True


def cancelling(task: asyncio.Task[Any] | None = None) -> int:
    """Count the cancellations of a task, the running one by default, that nobody has taken back."""
    task = asyncio.current_task() if task is None else task
    return 0 if task is None else task.cancelling()


def _of(loop: asyncio.AbstractEventLoop) -> _Waiting:
    waiting = _waiting.get(loop)
    if waiting is None:
        for ended in [other for other in list(_waiting) if other.is_closed()]:
            _waiting.pop(ended, None)
        waiting = _waiting[loop] = {}
        loop.call_later(CANCEL_POLL_S, _look, loop)
    return waiting


def _look(loop: asyncio.AbstractEventLoop) -> None:
    waiting = _waiting[loop]
    for watched, signal in list(waiting.items()):
        if signal.is_set() and watched.end(loop.time()):
            del waiting[watched]
    if waiting:
        loop.call_later(CANCEL_POLL_S, _look, loop)
    else:
        del _waiting[loop]
