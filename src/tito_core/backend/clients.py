"""One pooled HTTP client per event loop, closed when its loop ends."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable

import httpx

Make = Callable[[], httpx.AsyncBaseTransport]
Holder = AsyncGenerator[httpx.AsyncClient]


class LoopClients:
    """Clients by event loop; loops and threads may share it.

    A loop closes the suspended async generators that are left when it ends, or that nobody refers to any more, so a
    client that is held in one is closed with it. (Weak references to loops would not do: a client holds its loop.)

    Args:
        make: Makes the transport of one client.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._held: dict[asyncio.AbstractEventLoop, tuple[Holder, httpx.AsyncClient]] = {}

    async def current(self) -> httpx.AsyncClient:
        """Give the running loop's client."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            self._forget_closed_loops()
            holder = _hold(self._make, weakref.ref(self), loop)
            held = self._held[loop] = (holder, await anext(holder))
        return held[1]

    async def aclose(self) -> None:
        """Close the running loop's client."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[0].aclose()

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of a loop's client, which has been closed."""
        self._held.pop(loop, None)

    def _forget_closed_loops(self) -> None:
        """Let go of loops that were closed without shutting their async generators down."""
        for loop in list(self._held):
            if loop.is_closed():
                self.forget(loop)


async def _hold(make: Make, owner: weakref.ref[LoopClients], loop: asyncio.AbstractEventLoop) -> Holder:
    # The owner weakly: in a reference cycle the client's sockets would be collected before it could be closed.
    client = httpx.AsyncClient(transport=make(), trust_env=False, follow_redirects=False)
    try:
        yield client
    finally:
        if (clients := owner()) is not None:
            clients.forget(loop)
        await client.aclose()
