"""A few turns' work at a time, and others' in between: with thousands of rollouts the event loop stays responsive.

Preparing a turn and reading its answer take a millisecond or two of CPU. When many are due at once, an event loop does
all of them before it looks at anything else, such as a timer, a health check or a new connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

ROUND = 8
"""Most pieces of work in one round of an event loop: more would hold others up, fewer would cost a round's own work
each."""
LONGEST_S = 0.005
"""How long a round may take before later ones do fewer pieces: with each goes what its agent does before and after it,
such as to write a long history for a trace. Whoever sleeps is up after two or three rounds."""


@dataclass(slots=True)
class _Round:
    began: float
    most: int = ROUND
    gone: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def end(self, now: float) -> None:
        """Let the next one do as many pieces as would have fitted into this one's time, or one more."""
        took = now - self.began
        if took > LONGEST_S:
            self.most = max(1, int(self.gone * LONGEST_S / took))
        elif self.most < ROUND:
            self.most += 1
        self.began, self.gone = now, 0


_rounds: dict[asyncio.AbstractEventLoop, _Round] = {}


async def yield_to_loop() -> None:
    """Go on at once where few others of this event loop do in its present round, else in the order of coming."""
    loop = asyncio.get_running_loop()
    present = _rounds.get(loop)
    if present is None:
        for ended in [other for other in list(_rounds) if other.is_closed()]:
            _rounds.pop(ended, None)
        present = _rounds[loop] = _Round(loop.time())
        loop.call_soon(_next, loop)
    if present.gone < present.most:
        present.gone += 1
        return
    future: asyncio.Future[None] = loop.create_future()
    present.waiting.append(future)
    await future


def _next(loop: asyncio.AbstractEventLoop) -> None:
    present = _rounds[loop]
    present.end(loop.time())
    while present.waiting and present.gone < present.most:
        future = present.waiting.popleft()
        if not future.done():  # else who waited was cancelled
            future.set_result(None)
            present.gone += 1
    if present.gone:
        loop.call_soon(_next, loop)
    else:
        del _rounds[loop]
