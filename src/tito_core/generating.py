"""A turn while the engine works on it: watched for the agent's cancel signal and the user's deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

from tito_core.backend.aborts import generate_whole
from tito_core.backend.errors import EngineTimeoutError
from tito_core.backend.protocol import Backend, OnChunk, TokenChunk, TokenRequest, TokenResponse
from tito_core.cancelling import Watched, cancelling
from tito_core.settings import Settings


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
    return await _within(backend, request, cancel, chosen, None)


async def streamed(
    backend: Backend, request: TokenRequest, cancel: threading.Event | None, chosen: Settings
) -> AsyncGenerator[TokenChunk | TokenResponse]:
    """Generate a turn's answer, as `whole` does, and yield its chunks as they come, and last the whole response."""
    if cancel is not None and cancel.is_set():
        raise CancelledBySignal
    came: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
    task = asyncio.ensure_future(_within(backend, request, cancel, chosen, came.put_nowait))
    task.add_done_callback(lambda _: came.put_nowait(None))
    try:
        async with _Owned(task):
            while (chunk := await came.get()) is not None:
                yield chunk
            yield task.result()
    finally:
        del task  # whose error knows this frame: what a lost turn held is let go of at once


async def _within(
    backend: Backend,
    request: TokenRequest,
    cancel: threading.Event | None,
    chosen: Settings,
    on_chunk: OnChunk | None,
) -> TokenResponse:
    """Generate until the signal is set or the time is up, which both cancel what is under way and wait for its end."""
    timeout_s = chosen.turn_timeout_s
    if cancel is None and timeout_s is None:
        return await generate_whole(backend, request, chosen.aborts, on_chunk)
    if cancelling():
        await asyncio.sleep(0)  # a cancellation that has yet to arrive would be taken for the limit's own
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            with Watched(limit, cancel):
                return await generate_whole(backend, request, chosen.aborts, on_chunk)
    except Exception as error:
        if not limit.expired():
            raise
        # Whatever a backend makes of being cancelled, this is why it was.
        if timeout_s is None or (cancel is not None and cancel.is_set()):
            raise CancelledBySignal from _unless_time(error)
        raise EngineTimeoutError(
            f"{backend.name} did not answer the turn within turn_timeout_s={timeout_s:g}, whatever took the time "
            "(an answer, a pause, retries, resumed parts). The turn was given up, and the server told to abort it.",
            backend=backend.name,
            request_id=request.request_id,
        ) from _unless_time(error)
    finally:
        del limit  # which knows the task, whose error knows this frame


def _unless_time(error: Exception) -> Exception | None:
    """Give the cause of a turn's end that says more than that it did."""
    if not isinstance(error, TimeoutError):
        return error
    error.with_traceback(None)  # where the limit is, too
    return None


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
