"""Work that an agent's cancel signal may end: one look at all signals of an event loop at a time."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

CANCEL_POLL_S = 0.05
"""How often agents' cancel signals, `threading.Event`s that nobody can await, are looked at."""

_Waiting = dict[asyncio.Timeout, threading.Event]
_waiting: dict[asyncio.AbstractEventLoop, _Waiting] = {}


class Watched:
    """Lets a signal end the block of an `asyncio.timeout`, as its time would. Enter it inside that block.

    It takes a loop of thousands of rollouts one timer, not one each, and no task beside the caller's.

    Args:
        limit: The block's.
        signal: An agent's, or None.
    """

    __slots__ = ("_limit", "_signal", "_waiting")

    def __init__(self, limit: asyncio.Timeout, signal: threading.Event | None) -> None:
        self._limit = limit
        self._signal = signal
        self._waiting: _Waiting = {}

    def __enter__(self) -> None:
        if self._signal is not None:
            self._waiting = _of(asyncio.get_running_loop())
            self._waiting[self._limit] = self._signal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.pop(self._limit, None)


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
    for limit, signal in list(waiting.items()):
        if signal.is_set():
            del waiting[limit]
            if not limit.expired():
                limit.reschedule(loop.time())
    if waiting:
        loop.call_later(CANCEL_POLL_S, _look, loop)
    else:
        del _waiting[loop]
