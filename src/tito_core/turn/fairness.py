"""Let other tasks of the event loop run between the steps of turns.

Preparing a turn and reading its answer take a millisecond or two of CPU each. When many turns are due at once, the
event loop would run all of them before any timer, health check or new connection. `yield_to_loop` limits the number of
such steps in each round of the loop, so that the loop stays responsive with thousands of rollouts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

ROUND = 8
"""Maximum pieces of work in one round of an event loop. More would delay other tasks; fewer would cost more rounds."""
LONGEST_S = 0.005
"""Time of a round, in seconds, above which later rounds run fewer pieces. It includes the agent's own work around each
piece, such as writing a long history to a trace. A task that sleeps wakes after two or three rounds."""


@dataclass(slots=True)
class _Round:
    """A round of one event loop.

    Attributes:
        began: The loop's time at its start.
        limit: Maximum pieces of work.
        done: Pieces of work so far.
        waiting: Later pieces, first come first served.
    """

    began: float
    limit: int = ROUND
    done: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def end(self, now: float) -> None:
        """Set the next round's limit: the pieces that would have fitted into `LONGEST_S`, or one more than before."""
        took = now - self.began
        if took > LONGEST_S:
            self.limit = max(1, int(self.done * LONGEST_S / took))
        elif self.limit < ROUND:
            self.limit += 1
        self.began, self.done = now, 0


_rounds: dict[asyncio.AbstractEventLoop, _Round] = {}


async def yield_to_loop() -> None:
    """Wait for a later round of the event loop if this round has reached its limit; else return at once.

    Tasks that wait continue in the order in which they called this function.
    """
    loop = asyncio.get_running_loop()
    current = _rounds.get(loop)
    if current is None:
        for closed in [other for other in list(_rounds) if other.is_closed()]:
            _rounds.pop(closed, None)
        current = _rounds[loop] = _Round(loop.time())
        loop.call_soon(_next_round, loop)
    if current.done < current.limit:
        current.done += 1
        return
    future: asyncio.Future[None] = loop.create_future()
    current.waiting.append(future)
    await future


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
