"""Many rollouts in one event loop do not block other tasks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.scripted import Says, model_of, with_parts
from tito_core import TITOModel
from tito_core.chat.comparison import Comparisons
from tito_core.chat.referee import Referee
from tito_core.turn import generate as fairness
from tito_core.turn import request, run
from tito_core.turn.generate import LONGEST_S, ROUND, yield_to_loop

TASKS = 15 * ROUND


class Rounds:
    """Count an event loop's rounds and the pieces of work in each."""

    def __init__(self) -> None:
        self.number = 0
        self.done: Counter[int] = Counter()

    def note(self) -> None:
        self.done[self.number] += 1

    async def during(self, work: Any) -> None:
        async def count() -> None:
            while True:
                self.number += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        await work
        counting.cancel()


async def test_simultaneous_tasks_run_a_few_at_a_time_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "LONGEST_S", 60.0)  # on a busy machine a round may take longer than it should
    went: list[int] = []
    rounds = Rounds()

    async def one(number: int) -> None:
        await yield_to_loop()
        went.append(number)
        rounds.note()

    await rounds.during(asyncio.gather(*map(one, range(TASKS))))
    assert went == list(range(TASKS))
    assert max(rounds.done.values()) == ROUND
    assert len(rounds.done) == TASKS // ROUND
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not fairness._rounds


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, ROUND)), max_size=30))
def test_long_rounds_lower_the_limit_and_short_ones_raise_it(rounds: list[tuple[float, int]]) -> None:
    current, now = fairness._Round(5.0), 5.0
    for took, done in rounds:
        before = current.limit
        now += took
        took = now - current.began
        current.done = min(done, before)
        pieces = current.done
        current.end(now)
        assert 1 <= current.limit <= ROUND
        assert (current.done, current.began) == (0, now)
        if took <= LONGEST_S:
            assert current.limit == min(before + 1, ROUND)
        else:
            assert current.limit == 1 or current.limit / pieces * took <= LONGEST_S * (1 + 1e-9)
    for _ in range(ROUND):
        current.end(now)
    assert current.limit == ROUND


async def test_few_tasks_neither_wait_nor_cost_the_loop_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    end = fairness._next_round
    monkeypatch.setattr(fairness, "_next_round", lambda loop: (called.append(loop), end(loop)))
    for number in range(ROUND):
        assert not called, number
        with pytest.raises(StopIteration):
            yield_to_loop().send(None)
        await asyncio.sleep(0)
    assert len(called) == 1
    assert not fairness._rounds


async def test_a_cancelled_task_does_not_delay_others() -> None:
    tasks = [asyncio.ensure_future(yield_to_loop()) for _ in range(4 * ROUND)]
    await asyncio.sleep(0)
    for task in tasks[ROUND : 3 * ROUND]:
        task.cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [number // ROUND in (1, 2) for number in range(4 * ROUND)]


def test_a_closed_loop_is_forgotten() -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(yield_to_loop())
    loop.close()
    asyncio.run(yield_to_loop())
    assert loop not in fairness._rounds


async def test_turns_of_many_rollouts_run_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds()

    def noted(work: Any) -> Any:
        def do(*arguments: Any, **options: Any) -> Any:
            rounds.note()
            return work(*arguments, **options)

        return do

    monkeypatch.setattr(request, "prepare", noted(request.prepare))
    monkeypatch.setattr(run, "read_answer", noted(run.read_answer))
    models = [model_of("vllm", Says("Yes.")) for _ in range(TASKS)]

    async def ask(model: Any) -> None:
        async for _ in model.stream([{"role": "user", "content": [{"text": "Well?"}]}]):
            pass

    await rounds.during(asyncio.gather(*map(ask, models)))
    assert sum(rounds.done.values()) == 2 * TASKS
    assert max(rounds.done.values()) <= ROUND
    assert [len(model.ledger) for model in models] == [1] * TASKS


def with_new_comparisons(model: TITOModel) -> TITOModel:
    """Return a model whose template has compared nothing yet: tests share templates, and these compare ever less."""
    template = model.policy.template
    comparisons = Comparisons(template._comparisons._referee, template.certificate)
    return with_parts(model, template=replace(template, _comparisons=comparisons))


@pytest.mark.parametrize(("exchanges", "in_the_loop"), [(1, True), (2 * request.COMPARED_HERE, False)])
async def test_a_long_conversation_is_compared_in_a_thread(
    exchanges: int, in_the_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    render = Referee.render

    def noted(*arguments: Any, **options: Any) -> str:
        threads.append(threading.get_ident())
        return render(*arguments, **options)

    model = with_new_comparisons(model_of("vllm", Says("Yes.")))
    monkeypatch.setattr(Referee, "render", noted)
    question: list[Any] = [{"role": "user", "content": [{"text": "Well?"}]}]
    exchange: list[Any] = [*question, {"role": "assistant", "content": [{"text": "Yes."}]}]
    async for _ in model.stream([*exchange * exchanges, *question]):
        pass
    assert threads
    assert (set(threads) == {threading.get_ident()}) == in_the_loop
