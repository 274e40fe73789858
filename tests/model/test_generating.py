"""Generating a turn: its chunks, its cancel signal, its timeout, and the cleanup when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.backends import SOON_S
from tito_core.backend import EngineConnectionError, EngineTimeoutError, SamplingParams
from tito_core.backend.protocol import TokenResponse
from tito_core.ledger.turn import Finish, VersionSpan
from tito_core.settings import Settings
from tito_core.turn import generate
from tito_core.turn.generate import CancelledBySignal, generate_answer, stream_answer

pytestmark = pytest.mark.usefixtures("frozen_heap", "unchecked")


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


class Engine:
    """A backend that answers when its gate opens, and records how each request ended."""

    name = "fake"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.ended: list[str] = []
        self.watcher: Any = None
        self.fails: BaseException | None = None
        self.abort_s = 0.01

    async def generate(self, request: Any, on_chunk: Any = None) -> TokenResponse:
        self.watcher = on_chunk
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(asyncio.sleep(self.abort_s)))
            self.ended.append("aborted")
            if self.fails is not None:
                raise self.fails from None
            raise
        if self.fails is not None:
            raise self.fails
        self.ended.append("answered")
        return TokenResponse(
            *(ids(7), np.array([-1.0], np.float32), Finish.LENGTH, None, 2, None, 0.1, "r", (VersionSpan(0, 1, None),))
        )


REQUEST: Any = SimpleNamespace(sampling=SamplingParams(max_new_tokens=1), request_id="r")


async def answer(engine: Any, request: Any, cancel: threading.Event | None, chosen: Settings) -> AsyncIterator[Any]:
    """Yield the parts of an answer, as `run_turn` does."""
    if not chosen.stream:
        yield await generate_answer(engine, request, cancel, chosen)
        return
    async for part in stream_answer(engine, request, cancel, chosen):
        yield part


async def all_of(parts: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in parts]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_error_is_raised_unchanged(stream: bool) -> None:
    for error in (EngineConnectionError("gone"), TimeoutError("its own")):
        engine = Engine()
        engine.fails = error
        engine.gate.set()
        with pytest.raises(type(error)) as caught:
            await all_of(answer(engine, REQUEST, None, Settings.of(stream=stream, turn_timeout_s=5)))
        assert caught.value is error


async def watched(signal: threading.Event, over: asyncio.Event) -> bool:
    """Wait for an event, and return whether the signal ended the wait."""
    try:
        async with asyncio.timeout(None) as limit:
            with generate.CancelWatch(limit, signal):
                await over.wait()
    except TimeoutError:
        assert limit.expired()
        return True
    return False


async def test_signals_are_polled_only_during_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "CANCEL_POLL_S", 0.001)
    loop = asyncio.get_running_loop()
    signals = [threading.Event() for _ in range(3)]
    overs = [asyncio.Event() for _ in signals]
    waits = [asyncio.ensure_future(watched(*each)) for each in zip(signals, overs, strict=True)]
    await asyncio.sleep(0.02)
    assert len(generate._watches[loop]) == 3
    signals[1].set()
    assert await waits[1]
    assert [wait.done() for wait in waits] == [False, True, False]
    overs[0].set()
    assert not await waits[0]
    waits[2].cancel()
    await asyncio.wait([waits[2]])
    assert waits[2].cancelled()
    await asyncio.sleep(0.02)
    assert loop not in generate._watches


async def test_an_answer_despite_the_cancellation_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "CANCEL_POLL_S", 0.001)
    signal = threading.Event()
    signal.set()
    async with asyncio.timeout(None) as limit:
        with generate.CancelWatch(limit, signal):
            try:
                await asyncio.sleep(SOON_S)
            except asyncio.CancelledError:
                answer = "whole"
    assert answer == "whole"
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling(), "the task has no pending cancellation"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["task", "signal", "time"])
async def test_a_signal_does_not_cancel_a_turn_that_is_aborting(first: str, stream: bool) -> None:
    engine, signal = Engine(), threading.Event()
    engine.abort_s = 4 * generate.CANCEL_POLL_S
    chosen = Settings.of(stream=stream)

    async def turn() -> list[Any]:
        async with asyncio.timeout(0.02 if first == "time" else None):
            return await all_of(answer(engine, REQUEST, signal, chosen))

    task = asyncio.ensure_future(turn())
    await asyncio.sleep(0.01)
    if first == "time":
        await asyncio.sleep(0.02)
    elif first == "task":
        task.cancel()
    signal.set()
    if first == "signal":
        task.cancel()
    with pytest.raises(TimeoutError if first == "time" else asyncio.CancelledError):
        await task
    assert engine.ended == ["aborted"], "the abort was awaited"


async def test_a_signal_that_is_swallowed_is_delivered_again() -> None:
    signal, rounds = threading.Event(), 0

    async def work() -> None:
        nonlocal rounds
        async with asyncio.timeout(None) as limit:
            with generate.CancelWatch(limit, signal):
                while True:
                    rounds += 1
                    try:
                        async with asyncio.timeout(0.01):
                            await asyncio.sleep(SOON_S)
                    except TimeoutError:
                        signal.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work(), SOON_S)
    assert rounds > 1
    assert not generate.cancelling()


@pytest.mark.parametrize("by", ["signal", "time"])
async def test_a_pending_cancellation_is_not_taken_for_a_signal_or_timeout(by: str) -> None:
    engine, signal = Engine(), threading.Event()
    chosen = Settings.of(turn_timeout_s=0.1 if by == "time" else None)

    async def turn() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as a hook of the agent's may
        await generate_answer(engine, REQUEST, signal, chosen)  # type: ignore[arg-type]

    task = asyncio.ensure_future(turn())
    asyncio.get_running_loop().call_later(0.01, signal.set)
    await asyncio.wait({task})
    assert task.cancelled()
    assert engine.ended == [], "nothing was sent"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["signal", "time"])
@pytest.mark.parametrize("error", [RuntimeError("late"), TimeoutError("its own"), EngineConnectionError("gone")])
async def test_the_turns_error_is_its_reason_whatever_the_backend_raises(
    error: Exception, by: str, stream: bool
) -> None:
    engine, signal = Engine(), threading.Event()
    engine.fails = error
    chosen = Settings.of(stream=stream, turn_timeout_s=0.05 if by == "time" else None)
    task = asyncio.ensure_future(all_of(answer(engine, REQUEST, signal, chosen)))
    await asyncio.sleep(0.01)
    if by == "signal":
        signal.set()
    with pytest.raises(CancelledBySignal if by == "signal" else EngineTimeoutError) as caught:
        await task
    assert caught.value.__cause__ is (None if isinstance(error, TimeoutError) else error)
    assert engine.ended == ["aborted"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["task", "signal", "time", "error"])
async def test_a_failed_turn_leaves_no_reference_cycle(how: str, stream: bool) -> None:
    engine, signal = Engine(), threading.Event()
    if how == "error":
        engine.fails = EngineConnectionError("gone")
        engine.gate.set()
    chosen = Settings.of(stream=stream, turn_timeout_s=0.05 if how == "time" else None)
    gc.collect()
    gc.disable()
    try:
        task = asyncio.ensure_future(all_of(answer(engine, REQUEST, signal, chosen)))
        await asyncio.sleep(0.01)
        if how == "task":
            task.cancel()
        elif how == "signal":
            signal.set()
        await asyncio.wait({task})
        with contextlib.suppress(BaseException):
            task.result()
        held = weakref.ref(engine)
        engine.fails = None
        del task, engine
        await asyncio.sleep(0)
        assert held() is None, "a cycle of references holds it"
    finally:
        gc.enable()


def test_a_closed_loop_is_forgotten() -> None:
    async def wait() -> None:
        over = asyncio.Event()
        over.set()
        await watched(threading.Event(), over)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait())
    loop.close()
    asyncio.run(wait())
    assert loop not in generate._watches


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rounds", range(4))
def test_a_loop_that_ends_as_a_turn_begins_leaves_no_unawaited_coroutine(rounds: int, stream: bool) -> None:
    engine = Engine()

    async def main() -> None:
        left = asyncio.ensure_future(all_of(answer(engine, REQUEST, None, Settings.of(stream=stream))))
        for _ in range(rounds):
            await asyncio.sleep(0)
        assert not left.done()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
