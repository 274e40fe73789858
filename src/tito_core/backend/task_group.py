"""A task group whose errors callers catch as they are, for concurrent requests to one engine or to several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open an `asyncio.TaskGroup` that raises its first error itself, not an `ExceptionGroup` that holds it.

    The first error cancels the group's other tasks.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
