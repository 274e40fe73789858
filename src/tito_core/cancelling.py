"""Work that an agent's cancel signal may end: one look at all signals of an event loop at a time."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any

CANCEL_POLL_S = 0.05
"""How often agents' cancel signals, `threading.Event`s that nobody can await, are looked at."""

_Waiting = dict["Watched", threading.Event]
_waiting: dict[asyncio.AbstractEventLoop, _Waiting] = {}


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
