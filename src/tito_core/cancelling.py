"""Waiting for work that an agent's cancel signal may end: one look at all signals of an event loop at a time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

CANCEL_POLL_S = 0.05
"""How often agents' cancel signals, `threading.Event`s that nobody can await, are looked at."""

_Waiting = dict[asyncio.Future[None], threading.Event]
_waiting: dict[asyncio.AbstractEventLoop, _Waiting] = {}


async def done_or_set(
    task: asyncio.Task[Any], signal: threading.Event | None, waiter: asyncio.Future[None] | None = None
) -> None:
    """Wait until a task is done, or a signal set. It takes a loop of thousands of them one timer, not one each.

    Args:
        task: The work.
        signal: An agent's, or None.
        waiter: What is waited for. A task that wakes it as its last act saves a round of the event loop, which goes by
            between a task's end and what is called at its end.
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future() if waiter is None else waiter

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
    waiting = None if signal is None else _watch(loop)
    if waiting is not None and signal is not None:
        waiting[waiter] = signal
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)
        if waiting is not None:
            waiting.pop(waiter, None)


def _watch(loop: asyncio.AbstractEventLoop) -> _Waiting:
    waiting = _waiting.get(loop)
    if waiting is None:
        for ended in [other for other in list(_waiting) if other.is_closed()]:
            _waiting.pop(ended, None)
        waiting = _waiting[loop] = {}
        loop.call_later(CANCEL_POLL_S, _look, loop)
    return waiting


def _look(loop: asyncio.AbstractEventLoop) -> None:
    waiting = _waiting[loop]
    for waiter, signal in list(waiting.items()):
        if signal.is_set() and not waiter.done():
            waiter.set_result(None)
    if waiting:
        loop.call_later(CANCEL_POLL_S, _look, loop)
    else:
        del _waiting[loop]
