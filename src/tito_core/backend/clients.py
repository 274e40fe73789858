"""One pool of HTTP connections per event loop, closed when its loop ends."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable

from tito_core.backend.carrier import Carrier

Make = Callable[[], Carrier]
Holder = AsyncGenerator[Carrier]


class LoopEndingError(RuntimeError):
    """A request was made in an event loop that is ending."""


class LoopCarriers:
    """Pools by event loop; loops and threads may share it.

    A loop closes the suspended async generators that are left when it ends, or that nobody refers to any more, so a
    pool that is held in one is closed with it. (Weak references to loops would not do: a pool holds its loop.)

    Args:
        make: Makes one pool, in the event loop that it is for.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._ending: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._held: dict[asyncio.AbstractEventLoop, tuple[Holder, Carrier]] = {}

    @property
    def held(self) -> Carrier | None:
        """The running loop's pool, or None where `current` has yet to make it."""
        held = self._held.get(asyncio.get_running_loop())
        return None if held is None else held[1]

    async def current(self) -> Carrier:
        """Give the running loop's pool.

        Raises:
            LoopEndingError: The loop has closed its async generators, and so the pool: there will be no other.
        """
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            if loop in self._ending:
                raise LoopEndingError("This event loop is ending and has closed its connections: nothing can be sent.")
            self._forget_closed_loops()
            holder = _hold(self._make, weakref.ref(self), loop)
            held = self._held[loop] = (holder, await anext(holder))
        return held[1]

    async def aclose(self) -> None:
        """Close the running loop's pool."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[0].aclose()

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of the pool of a loop that closes it."""
        if self._held.pop(loop, None) is not None:  # not by `aclose`, after which there may be another
            self._ending.add(loop)

    def _forget_closed_loops(self) -> None:
        """Let go of loops that were closed without shutting their async generators down."""
        for loop in list(self._held):
            if loop.is_closed():
                self._held.pop(loop, None)


async def _hold(make: Make, owner: weakref.ref[LoopCarriers], loop: asyncio.AbstractEventLoop) -> Holder:
    # The owner weakly: in a reference cycle the pool's sockets would be collected before it could be closed.
    carrier = make()
    try:
        yield carrier
    finally:
        if (pools := owner()) is not None:
            pools.forget(loop)
        await carrier.aclose()
