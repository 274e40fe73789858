"""A turn while the engine works on it: its chunks, its signal, its deadline, and what is left when it is lost."""

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

from tito_core.backend import EngineConnectionError, EngineTimeoutError, SamplingParams, resume
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.ledger.turn import Finish, VersionSpan
from tito_core.settings import Settings
from tito_core.turn import generate
from tito_core.turn.generate import CancelledBySignal, streamed, whole


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend here gives is checked by nobody: it is a `TokenResponse` already."""

    async def generate(backend: Any, request: Any, on_chunk: Any = None) -> TokenResponse:
        response: TokenResponse = await (
            backend.generate(request) if on_chunk is None else backend.generate(request, on_chunk)
        )
        return response

    monkeypatch.setattr(resume, "generate", generate)


class Engine:
    """A backend that answers when its gate is open, and says how it was left."""

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
    """Give what comes, as a turn asks for it."""
    if not chosen.stream:
        yield await whole(engine, request, cancel, chosen)
        return
    async for came in streamed(engine, request, cancel, chosen):
        yield came


async def all_of(coming: AsyncIterator[Any]) -> list[Any]:
    return [came async for came in coming]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_comes_last_after_its_chunks(stream: bool) -> None:
    engine = Engine()
    task = asyncio.ensure_future(all_of(answer(engine, REQUEST, threading.Event(), Settings.of(stream=stream))))
    await asyncio.sleep(0.01)
    chunks = [TokenChunk(ids(n)) for n in range(2)]
    if stream:
        for chunk in chunks:
            engine.watcher(chunk)
    else:
        assert engine.watcher is None
    engine.gate.set()
    *before, last = await task
    assert before == (chunks if stream else [])
    assert isinstance(last, TokenResponse)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_signal_ends_it_at_once_or_before_it_begins(stream: bool) -> None:
    engine, signal = Engine(), threading.Event()
    task = asyncio.ensure_future(all_of(answer(engine, REQUEST, signal, Settings.of(stream=stream))))
    await asyncio.sleep(0.01)
    signal.set()
    with pytest.raises(CancelledBySignal):
        await asyncio.wait_for(task, 5)
    assert engine.ended == ["aborted"], "and it was waited for"
    with pytest.raises(CancelledBySignal):
        await all_of(answer(engine, REQUEST, signal, Settings.of(stream=stream)))
    assert engine.ended == ["aborted"], "nothing was sent"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_is_given_up(stream: bool) -> None:
    engine = Engine()
    chosen = Settings.of(stream=stream, turn_timeout_s=0.05)
    with pytest.raises(EngineTimeoutError) as caught:
        await all_of(answer(engine, REQUEST, None, chosen))
    assert str(caught.value) == (
        "fake did not answer the turn within turn_timeout_s=0.05, whatever took the time (an answer, a pause, retries, "
        "resumed parts). The turn was given up, and the server told to abort it."
    )
    assert (caught.value.backend, caught.value.request_id) == ("fake", "r")
    assert engine.ended == ["aborted"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_engines_comes_out_as_it_is(stream: bool) -> None:
    for error in (EngineConnectionError("gone"), TimeoutError("its own")):
        engine = Engine()
        engine.fails = error
        engine.gate.set()
        with pytest.raises(type(error)) as caught:
            await all_of(answer(engine, REQUEST, None, Settings.of(stream=stream, turn_timeout_s=5)))
        assert caught.value is error


async def test_who_stops_listening_leaves_nothing_running() -> None:
    engine = Engine()
    coming = streamed(engine, REQUEST, None, Settings.of(stream=True))  # type: ignore[arg-type]
    first = asyncio.ensure_future(anext(coming))
    await asyncio.sleep(0.01)
    engine.watcher(TokenChunk(ids(1)))
    await first
    await coming.aclose()
    while not engine.ended:
        await asyncio.sleep(0.01)
    assert engine.ended == ["aborted"]


async def test_who_is_cancelled_waits_for_the_abort() -> None:
    engine = Engine()
    task = asyncio.ensure_future(all_of(answer(engine, REQUEST, None, Settings.of())))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.ended == ["aborted"]


async def watched(signal: threading.Event, over: asyncio.Event) -> bool:
    """Wait until it is over, and tell whether the signal ended that."""
    try:
        async with asyncio.timeout(None) as limit:
            with generate.Watched(limit, signal):
                await over.wait()
    except TimeoutError:
        assert limit.expired()
        return True
    return False


async def test_signals_are_looked_at_only_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "CANCEL_POLL_S", 0.001)
    loop = asyncio.get_running_loop()
    signals = [threading.Event() for _ in range(3)]
    overs = [asyncio.Event() for _ in signals]
    waits = [asyncio.ensure_future(watched(*each)) for each in zip(signals, overs, strict=True)]
    await asyncio.sleep(0.02)
    assert len(generate._waiting[loop]) == 3
    signals[1].set()
    assert await waits[1]
    assert [wait.done() for wait in waits] == [False, True, False]
    overs[0].set()
    assert not await waits[0]
    waits[2].cancel()
    await asyncio.wait([waits[2]])
    assert waits[2].cancelled()
    await asyncio.sleep(0.02)
    assert loop not in generate._waiting


async def test_a_signal_that_is_set_while_the_time_is_up_ends_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "CANCEL_POLL_S", 0.001)
    signal = threading.Event()
    seen: list[str] = []

    async def work() -> None:
        async with asyncio.timeout(0.01) as limit:
            with generate.Watched(limit, signal):
                try:
                    await asyncio.sleep(5)
                except asyncio.CancelledError:
                    signal.set()
                    seen.append("cancelled")
                    await asyncio.sleep(0.02)  # an abort, which no second cancellation may cut short
                    seen.append("aborted")
                    raise

    with pytest.raises(TimeoutError):
        await work()
    assert seen == ["cancelled", "aborted"]


async def test_an_answer_that_comes_although_it_was_cancelled_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "CANCEL_POLL_S", 0.001)
    signal = threading.Event()
    signal.set()
    async with asyncio.timeout(None) as limit:
        with generate.Watched(limit, signal):
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                answer = "whole"
    assert answer == "whole"
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling(), "nothing of it is left on the task"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["task", "signal", "time"])
async def test_a_signal_leaves_a_turn_alone_that_is_already_being_given_up(first: str, stream: bool) -> None:
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
    assert engine.ended == ["aborted"], "and it was waited for"


async def test_a_signal_that_came_too_early_is_seen_again() -> None:
    signal, rounds = threading.Event(), 0

    async def work() -> None:
        nonlocal rounds
        async with asyncio.timeout(None) as limit:
            with generate.Watched(limit, signal):
                while True:
                    rounds += 1
                    try:
                        async with asyncio.timeout(0.01):
                            await asyncio.sleep(5)
                    except TimeoutError:
                        signal.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work(), 5)
    assert rounds > 1
    assert not generate.cancelling()


@pytest.mark.parametrize("by", ["signal", "time"])
async def test_a_cancellation_that_has_yet_to_arrive_is_not_taken_for_another(by: str) -> None:
    engine, signal = Engine(), threading.Event()
    chosen = Settings.of(turn_timeout_s=0.1 if by == "time" else None)

    async def turn() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as a hook of the agent's may
        await whole(engine, REQUEST, signal, chosen)  # type: ignore[arg-type]

    task = asyncio.ensure_future(turn())
    asyncio.get_running_loop().call_later(0.01, signal.set)
    await asyncio.wait({task})
    assert task.cancelled()
    assert engine.ended == [], "nothing was sent"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["signal", "time"])
@pytest.mark.parametrize("error", [RuntimeError("late"), TimeoutError("its own"), EngineConnectionError("gone")])
async def test_whatever_a_backend_makes_of_being_cancelled_the_turn_says_why(
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
async def test_what_a_lost_turn_held_is_let_go_of_at_once(how: str, stream: bool) -> None:
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


def test_an_ended_loop_is_forgotten() -> None:
    async def wait() -> None:
        over = asyncio.Event()
        over.set()
        await watched(threading.Event(), over)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(wait())
    loop.close()
    asyncio.run(wait())
    assert loop not in generate._waiting


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rounds", range(4))
def test_a_loop_that_ends_as_a_turn_begins_leaves_nothing_that_nobody_awaits(rounds: int, stream: bool) -> None:
    engine = Engine()

    async def main() -> None:
        left = asyncio.ensure_future(all_of(answer(engine, REQUEST, None, Settings.of(stream=stream))))
        for _ in range(rounds):
            await asyncio.sleep(0)
        assert not left.done()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert [str(warning.message) for warning in told] == []
