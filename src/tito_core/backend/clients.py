"""One pooled HTTP client per event loop, closed when its loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import httpx

Held = tuple[AsyncGenerator[httpx.AsyncClient], httpx.AsyncClient]


class LoopClients:
    """Clients by event loop; loops and threads may share it.

    A loop that ends closes its suspended async generators, so a client that is held in one is closed with it. (Weak
    references to loops would not do: a client holds its loop.)

    Args:
        make: Makes the transport of one client.
    """

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        self._make = make
        self._held: dict[asyncio.AbstractEventLoop, Held] = {}

    async def current(self) -> httpx.AsyncClient:
        """Give the running loop's client."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            self._forget_closed_loops()
            holder = self._hold(loop)
            held = self._held[loop] = (holder, await anext(holder))
        return held[1]

    async def aclose(self) -> None:
        """Close the running loop's client."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[0].aclose()

    async def _hold(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[httpx.AsyncClient]:
        client = httpx.AsyncClient(transport=self._make(), trust_env=False, follow_redirects=False)
        try:
            yield client
        finally:
            self._held.pop(loop, None)
            await client.aclose()

    def _forget_closed_loops(self) -> None:
        """Let go of loops that were closed without shutting their async generators down."""
        for loop in list(self._held):
            if loop.is_closed():
                self._held.pop(loop, None)
