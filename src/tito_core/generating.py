"""A turn while the engine works on it: watched for the agent's cancel signal and the user's deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from tito_core.backend.aborts import generate_whole
from tito_core.backend.errors import EngineTimeoutError
from tito_core.backend.protocol import Backend, OnChunk, TokenChunk, TokenRequest, TokenResponse
from tito_core.cancelling import done_or_set
from tito_core.settings import Settings

T = TypeVar("T")


class CancelledBySignal(Exception):
    """The agent's cancel signal was set while the engine was working."""


async def whole(
    backend: Backend, request: TokenRequest, cancel: threading.Event | None, chosen: Settings
) -> TokenResponse:
    """Generate a turn's answer; whatever way it is lost, the engine is told to stop.

    Args:
        backend: The engine's.
        request: What is asked.
        cancel: The agent's cancel signal, or None.
        chosen: How long it may take with everything, and what becomes of aborts.

    Raises:
        CancelledBySignal: The signal was set first.
        EngineTimeoutError: The time was up first.
        BackendError: The engine failed.
    """
    if cancel is not None and cancel.is_set():
        raise CancelledBySignal
    return await _watched(partial(_in_time, backend, request, chosen, None), cancel)


async def streamed(
    backend: Backend, request: TokenRequest, cancel: threading.Event | None, chosen: Settings
) -> AsyncGenerator[TokenChunk | TokenResponse]:
    """Generate a turn's answer, as `whole` does, and yield its chunks as they come, and last the whole response."""
    if cancel is not None and cancel.is_set():
        raise CancelledBySignal
    came: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
    task = asyncio.ensure_future(_watched(partial(_in_time, backend, request, chosen, came.put_nowait), cancel))
    task.add_done_callback(lambda _: came.put_nowait(None))
    async with _Owned(task):
        while (chunk := await came.get()) is not None:
            yield chunk
        yield task.result()


async def _in_time(
    backend: Backend, request: TokenRequest, chosen: Settings, on_chunk: OnChunk | None
) -> TokenResponse:
    timeout_s = chosen.turn_timeout_s
    if timeout_s is None:
        return await generate_whole(backend, request, chosen.aborts, on_chunk)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await generate_whole(backend, request, chosen.aborts, on_chunk)
    except TimeoutError:
        if not limit.expired():
            raise
        raise EngineTimeoutError(
            f"{backend.name} did not answer the turn within turn_timeout_s={timeout_s:g}, whatever took the time "
            "(an answer, a pause, retries, resumed parts). The turn was given up, and the server told to abort it.",
            backend=backend.name,
            request_id=request.request_id,
        ) from None


async def _watched(work: Callable[[], Awaitable[T]], cancel: threading.Event | None) -> T:
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(_waking(waiter, work))
    async with _Owned(task):
        await done_or_set(task, cancel, waiter)
        if not task.done():
            raise CancelledBySignal
        return task.result()


async def _waking(waiter: asyncio.Future[None], work: Callable[[], Awaitable[T]]) -> T:
    done = await work()  # not a coroutine made before, which nobody awaits where an ending loop cancels this at once
    if not waiter.done():
        waiter.set_result(None)
    return done


class _Owned:
    """A task that is not left behind by who waits for it."""

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    async def __aenter__(self) -> None:
        """Begin to wait."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel it if it is not done, and wait until it has seen to its abort."""
        if self._task.done():
            return
        if isinstance(error, GeneratorExit):  # who is closed cannot wait: it aborts by itself, if its loop still runs
            with contextlib.suppress(RuntimeError):
                self._task.cancel()
            return
        self._task.cancel()
        await asyncio.wait({self._task})  # unlike `await task`, lets a second cancellation of ours through
