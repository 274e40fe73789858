"""A turn while the engine works on it: watched for the agent's cancel signal and the user's deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tito_core.backend.aborts import Aborts, generate_whole
from tito_core.backend.errors import EngineTimeoutError
from tito_core.backend.protocol import Backend, TokenRequest, TokenResponse

T = TypeVar("T")
CANCEL_POLL_S = 0.05
"""How often an agent's cancel signal, a `threading.Event` that nobody can await, is looked at."""


class CancelledBySignal(Exception):
    """The agent's cancel signal was set while the engine was working."""


async def generate(
    backend: Backend,
    request: TokenRequest,
    cancel: threading.Event | None,
    aborts: Aborts,
    timeout_s: float | None = None,
) -> TokenResponse:
    """Generate a turn's answer; whatever way it is lost, the engine is told to stop.

    Args:
        backend: The engine's.
        request: What is asked.
        cancel: The agent's cancel signal, or None.
        aborts: What becomes of an answer that the engine was told to abort.
        timeout_s: Longest wait for the answer in seconds, with everything: retries, a paused server, resumed parts.

    Raises:
        CancelledBySignal: The signal was set first.
        EngineTimeoutError: The time was up first.
        BackendError: The engine failed.
    """
    if cancel is not None and cancel.is_set():
        raise CancelledBySignal
    return await _watched(_in_time(backend, request, aborts, timeout_s), cancel)


async def _in_time(backend: Backend, request: TokenRequest, aborts: Aborts, timeout_s: float | None) -> TokenResponse:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await generate_whole(backend, request, aborts)
    except TimeoutError:
        if not limit.expired():
            raise
        raise EngineTimeoutError(
            f"{backend.name} did not answer the turn within turn_timeout_s={timeout_s:g}, whatever took the time "
            "(an answer, a pause, retries, resumed parts). The turn was given up, and the server told to abort it.",
            backend=backend.name,
            request_id=request.request_id,
        ) from None


async def _watched(work: Coroutine[Any, Any, T], cancel: threading.Event | None) -> T:
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=CANCEL_POLL_S if cancel is not None else None)
            if done:
                return task.result()
            if cancel is not None and cancel.is_set():
                raise CancelledBySignal
    except GeneratorExit:  # a coroutine that is closed cannot wait: the task aborts by itself, if its loop still runs
        with contextlib.suppress(RuntimeError):
            task.cancel()
        raise
    except BaseException:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # unlike `await task`, lets a second cancellation of ours through
        raise
