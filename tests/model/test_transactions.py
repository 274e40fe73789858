"""Law 5: a turn interrupted at any await point, in any way, leaves no trace; other turns stay."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from support.interrupts import Boom
from support.losses import OUTER_WAYS, WAYS, Loss, World, collect, no_noise, world
from support.scripted import BACKENDS
from tito_core import store
from tito_core.ledger import check_ledger
from tito_core.policy import run_blocking

pytestmark = pytest.mark.usefixtures("frozen_heap")


async def assert_no_trace(world: World, loss: Loss, reference: bytes) -> None:
    await world.until(lambda: not world.engine.running, "the engine still runs an abandoned request")
    assert world.seen() == loss.before, "the interrupted turn left a trace"
    for running in () if "closed" in loss.way else loss.running:  # what is closed cannot wait for an abort
        await world.until(partial(world.was_aborted, running), f"the engine got no abort of {running}")
    await world.play()
    check_ledger(world.model.ledger)
    assert store.encode(world.model.ledger, engine=False) == reference, "the next turn differs"
    assert [store.encode(found) for found in store.read(world.path)] == [store.encode(world.model.ledger)]


@cache
def undisturbed(kind: str) -> bytes:
    """Return the ledger of a world without an interrupted turn, without the `engine` records."""

    async def play() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            async with world(kind, "memory", Path(folder) / "reference") as made:
                made.other_turn()
                await made.play()
                return store.encode(made.model.ledger, engine=False)

    return run_blocking(play())


def on_alternating_backends(*ways: str) -> Any:
    """Run each way on one backend: what a way does is decided above them."""
    return pytest.mark.parametrize(("way", "kind"), [*zip(ways, cycle(BACKENDS), strict=False)])


@on_alternating_backends(*WAYS, "signal")
async def test_a_turn_interrupted_at_any_await_point_of_its_generator_leaves_no_trace(
    kind: str, way: str, tmp_path: Path
) -> None:
    lost = await lose_at_each(lambda loss, at: loss.run(at), kind, way, tmp_path)
    assert lost >= 2  # for a new connection, and for the answer


@on_alternating_backends(*OUTER_WAYS, *WAYS)
async def test_a_turn_interrupted_at_any_await_point_of_the_backend_leaves_no_trace(
    kind: str, way: str, tmp_path: Path
) -> None:
    lost = await lose_at_each(lambda loss, at: loss.run(None, backend_at=at), kind, way, tmp_path)
    assert lost >= 2


@pytest.mark.parametrize("where", ["generator", "backend"])
@pytest.mark.parametrize("way", [*WAYS, *OUTER_WAYS])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_turn_interrupted_while_the_engine_generates_is_aborted(
    kind: str, way: str, where: str, tmp_path: Path
) -> None:
    async with world(kind, "socket", tmp_path / "rollouts") as made:
        with no_noise():
            loss = Loss(made, way, in_flight=True)
            at, backend_at = (0, None) if where == "generator" else (None, 0)
            assert not await loss.run(at, backend_at=backend_at)
            assert loss.running
            await assert_no_trace(made, loss, undisturbed(kind))


@pytest.mark.parametrize("again", [asyncio.CancelledError, Boom, GeneratorExit])
@pytest.mark.parametrize("way", ["boom", "cancelled", "timeout", "signal"])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_turn_interrupted_again_during_its_cleanup_is_still_aborted(
    kind: str, way: str, again: type[BaseException], tmp_path: Path
) -> None:
    async with world(kind, "socket", tmp_path / "rollouts") as made:
        with no_noise():
            loss = Loss(made, way, in_flight=True, again=again)
            assert not await loss.run(0)
            assert loss.interrupted_again
            assert loss.running
            await assert_no_trace(made, loss, undisturbed(kind))


async def lose_at_each(run: Callable[[Loss, int], Awaitable[bool]], kind: str, way: str, folder: Path) -> int:
    """Interrupt a turn at suspension 0, 1, 2, ... until it has no more; return their number.

    The engine is behind a socket: in memory the innermost frames would be the engine's own.
    """
    for at in itertools.count():
        async with world(kind, "socket", folder / "rollouts") as made:
            with no_noise():
                loss = Loss(made, way)
                whole = await run(loss, at)
                if not loss.happened:
                    assert whole
                    return at
                if whole:  # the answer arrived before the signal was polled
                    assert way == "signal"
                    assert store.encode(made.model.ledger, engine=False) == undisturbed(kind)
                else:
                    await assert_no_trace(made, loss, undisturbed(kind))
    raise AssertionError


@pytest.mark.parametrize("how", ["aclosed", "dropped", "thrown into", "cancelled"])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_turn_interrupted_at_any_event_leaves_no_trace(kind: str, how: str, tmp_path: Path) -> None:
    async def lose(made: World, loss: Loss, taken: int) -> None:
        stream = made.turn()
        for _ in range(taken):
            await anext(stream)
        made.other_turn()
        loss.before = made.seen()
        if how == "aclosed":
            await stream.aclose()
        elif how == "thrown into":
            with pytest.raises(Boom):
                await stream.athrow(Boom())
        elif how == "cancelled":
            waiting = asyncio.create_task(_take_and_wait(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
        del stream
        gc.collect()
        await asyncio.sleep(0)

    async with world(kind, "memory", tmp_path / "counted") as made:
        events = len(await collect(made.turn()))
    for taken in range(
        1, events + (how != "cancelled")
    ):  # a consumer that asks for more after the last event completes the turn
        async with world(kind, "memory", tmp_path / "rollouts") as made:
            with no_noise():
                loss = Loss(made, how)
                await lose(made, loss, taken)
                await assert_no_trace(made, loss, undisturbed(kind))


async def _take_and_wait(stream: AsyncGenerator[Any]) -> None:
    """Take one event and wait forever."""
    async for _ in stream:
        await asyncio.Event().wait()
