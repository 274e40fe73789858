"""Many rollouts in one event loop leave room for others."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from support.scripted import BACKENDS, Says, model_of
from tito_core import turnstile
from tito_core.turnstile import ROUND, in_turn

WORK_S, TASKS = 0.003, 15 * ROUND


async def late_by(work: Any) -> float:
    """Give how late a timer was at worst while work ran, in seconds."""
    worst = 0.0

    async def beat() -> None:
        nonlocal worst
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0)
            worst = max(worst, time.perf_counter() - began)

    beating = asyncio.ensure_future(beat())
    await work
    beating.cancel()
    return worst


async def test_who_comes_together_goes_a_few_at_a_time_in_order() -> None:
    went: list[int] = []

    async def one(number: int) -> None:
        await in_turn()
        time.sleep(WORK_S)
        went.append(number)

    began = time.perf_counter()
    worst = await late_by(asyncio.gather(*map(one, range(TASKS))))
    assert went == list(range(TASKS))
    assert worst < (time.perf_counter() - began) / 4, "others ran in between"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not turnstile._rounds


async def test_who_is_alone_does_not_wait() -> None:
    one = in_turn()
    with pytest.raises(StopIteration):
        one.send(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not turnstile._rounds


async def test_who_is_cancelled_holds_nobody_up() -> None:
    tasks = [asyncio.ensure_future(in_turn()) for _ in range(4 * ROUND)]
    await asyncio.sleep(0)
    for task in tasks[ROUND : 3 * ROUND]:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [number // ROUND in (1, 2) for number in range(4 * ROUND)]


def test_a_loop_that_ends_in_between_is_forgotten() -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(in_turn())
    loop.close()
    asyncio.run(in_turn())
    assert loop not in turnstile._rounds


@pytest.mark.parametrize("kind", BACKENDS)
async def test_turns_of_many_rollouts_are_done_a_few_at_a_time(kind: str) -> None:
    models = [model_of(kind, Says("Yes.")) for _ in range(TASKS)]

    async def ask(model: Any) -> None:
        async for _ in model.stream([{"role": "user", "content": [{"text": "word " * 500}]}]):
            pass

    await ask(model_of(kind, Says("Yes.")))
    began = time.perf_counter()
    worst = await late_by(asyncio.gather(*map(ask, models)))
    assert worst < (time.perf_counter() - began) / 4
    assert [len(model.ledger) for model in models] == [1] * TASKS
