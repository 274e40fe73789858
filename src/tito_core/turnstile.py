"""A few turns' work at a time, and others' in between: with thousands of rollouts the event loop stays responsive.

Preparing a turn and reading its answer take a millisecond or two of CPU. When many are due at once, an event loop does
all of them before it looks at anything else, such as a timer, a health check or a new connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

ROUND = 8
"""Pieces of work in one round of an event loop: more would hold others up, fewer would cost a round's own work each."""


@dataclass(slots=True)
class _Round:
    gone: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


_rounds: dict[asyncio.AbstractEventLoop, _Round] = {}


async def in_turn() -> None:
    """Go on at once where few others of this event loop do in its present round, else in the order of coming."""
    loop = asyncio.get_running_loop()
    present = _rounds.get(loop)
    if present is None:
        for ended in [other for other in list(_rounds) if other.is_closed()]:
            _rounds.pop(ended, None)
        present = _rounds[loop] = _Round()
        loop.call_soon(_next, loop)
    if present.gone < ROUND:
        present.gone += 1
        return
    future: asyncio.Future[None] = loop.create_future()
    present.waiting.append(future)
    await future


def _next(loop: asyncio.AbstractEventLoop) -> None:
    present = _rounds[loop]
    present.gone = 0
    while present.waiting and present.gone < ROUND:
        future = present.waiting.popleft()
        if not future.done():  # else who waited was cancelled
            future.set_result(None)
            present.gone += 1
    if present.gone:
        loop.call_soon(_next, loop)
    else:
        del _rounds[loop]
