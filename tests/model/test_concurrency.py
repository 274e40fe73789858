"""Concurrent agents, threads, event loops, invocations and resets; and invocations that stop half-way."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from strands import Agent
from strands.types.agent import ConcurrentInvocationMode
from strands.types.exceptions import ConcurrencyException, EventLoopException

from support.histories import add
from support.interrupts import Boom, Steps
from support.scripted import BACKENDS, END, Says, call, engine_of, ids_of, model_of, tokenizer
from tito_conformance.testing import ScriptedRequest, ScriptedServer
from tito_core import TITOModel
from tito_core.ledger import Ledger, Reason, check_ledger

pytestmark = pytest.mark.usefixtures("frozen_heap")


def agent_of(model: TITOModel, **options: Any) -> Agent:
    return Agent(model=model, tools=[add], callback_handler=None, system_prompt="Be brief.", **options)


def sums(prompt: ScriptedRequest) -> list[int]:
    """Call a tool after a user message, and answer after its result."""
    last_message = tokenizer().decode(prompt.prompt_ids).rsplit("<|im_start|>", 2)[1]
    answer = "Done." if "tool_response" in last_message else "Well, " + call("add", '{"a": 1, "b": 1}')
    return ids_of(answer + END)


def assert_one_line(ledger: Ledger, messages: list[Any]) -> None:
    """Check that a ledger has one trajectory with a turn for each of an agent's answers."""
    check_ledger(ledger)
    assert [turn.parent for turn in ledger] == [None, *range(len(ledger) - 1)]
    assert len(ledger) == sum(message["role"] == "assistant" for message in messages)


def assert_lines_apart(ledger: Ledger, count: int, turns: int) -> None:
    """Check that a ledger has `count` trajectories without common turns, of `turns` turns each."""
    check_ledger(ledger)
    lines = ledger.trajectories()
    assert [len(line.turns) for line in lines] == [turns] * count
    assert len(ledger) == count * turns


async def idle(engine: Any) -> None:
    deadline = time.monotonic() + 60
    while engine.running:
        assert time.monotonic() < deadline, "the engine still runs an abandoned request"
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("kind", BACKENDS)
def test_identical_agents_in_threads_stay_apart_through_the_synchronous_api(kind: str) -> None:
    with ScriptedServer(engine_of(kind, Says(sums), latency=lambda prompt: prompt.number % 3 * 0.002)) as server:
        model = TITOModel(backend=kind, base_url=server.base_url, tokenizer=tokenizer())
        agents = [agent_of(model) for _ in range(6)]
        with ThreadPoolExecutor(6) as threads:
            for _ in range(3):
                list(threads.map(lambda agent: agent("1 + 1?"), agents))
        assert_lines_apart(model.ledger, 6, 6)


@pytest.mark.parametrize("kind", BACKENDS)
def test_the_synchronous_api_has_a_fresh_loop_each_time_and_leaves_nothing_open(kind: str) -> None:
    with ScriptedServer(engine_of(kind, Says(sums))) as server:
        model = TITOModel(backend=kind, base_url=server.base_url, tokenizer=tokenizer())
        agent = agent_of(model)
        for _ in range(4):
            agent("1 + 1?")
        gc.collect()  # an unclosed client would warn here
        assert_one_line(model.ledger, agent.messages)
        assert [turn.draft.engine.request_id for turn in model.ledger] == [
            r.request_id for r in server.engine.requests[-8:]
        ]


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_loop_that_is_closed_under_a_turn_is_forgotten_quietly(kind: str) -> None:
    model = model_of(kind, Says("One."), latency=lambda prompt: 0.0 if prompt.number else 60.0)
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Task[Any]:
        stream = model.stream([{"role": "user", "content": [{"text": "Hi?"}]}])
        task = asyncio.ensure_future(anext(stream))
        while not model.scripted.running:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        return task

    loop.set_exception_handler(lambda loop, context: None)  # asyncio reports each dropped task
    task = loop.run_until_complete(begin())
    loop.close()
    del task, loop
    gc.collect()  # pytest fails the test on an unraisable error
    assert len(model.ledger) == 0
    agent_of(model)("And now?")
    assert [turn.parent for turn in model.ledger] == [None]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_second_invocation_that_strands_refuses_does_not_disturb_the_first(kind: str) -> None:
    model = model_of(kind, Says(sums), latency=0.02)
    agent = agent_of(model, concurrent_invocation_mode=ConcurrentInvocationMode.THROW)
    first = asyncio.ensure_future(agent.invoke_async("1 + 1?"))
    await asyncio.sleep(0)
    with pytest.raises(ConcurrencyException):
        await agent.invoke_async("2 + 2?")
    await first
    await agent.invoke_async("And?")
    assert_one_line(model.ledger, agent.messages)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_reentrant_invocations_of_one_agent_are_exact_or_linked(kind: str, count: int) -> None:
    script = Says("Fine.")
    model = model_of(kind, script, latency=lambda prompt: 0.002 + prompt.number * 7 % 5 * 0.004)
    agent = agent_of(model, concurrent_invocation_mode=ConcurrentInvocationMode.UNSAFE_REENTRANT)
    for number in range(3):
        await asyncio.gather(*(agent.invoke_async(f"{number}-{which}?") for which in range(count)))
    await agent.invoke_async("And now?")
    assert_exact(model, script)
    assert len(model.ledger) == 3 * count + 1
    roots = [turn for turn in model.ledger if turn.parent is None]
    assert all(turn.draft.branch is not None for turn in roots[1:])


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_consumer_that_breaks_out_anywhere_leaves_whole_turns_or_none(kind: str) -> None:
    await _stop_everywhere(kind, _break_at)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_agent_that_is_cancelled_anywhere_leaves_whole_turns_or_none(kind: str) -> None:
    await _stop_everywhere(kind, _cancel_at)


@pytest.mark.parametrize("error", [asyncio.CancelledError, Boom])  # Strands itself survives no closed invocation
@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_invocation_lost_at_any_await_point_leaves_whole_turns_or_none(
    kind: str, error: type[BaseException]
) -> None:
    async def stop(agent: Agent, at: int) -> int:
        steps = Steps(agent.invoke_async("1 + 1?"), at - 1, lambda steps: steps.throw(error()))
        task = asyncio.ensure_future(_awaited(steps))
        await asyncio.wait({task})
        assert task.cancelled() or task.exception() is None or isinstance(task.exception(), Boom | EventLoopException)
        return steps.count

    await _stop_everywhere(kind, stop)


async def _awaited(steps: Steps[Any]) -> Any:
    return await steps


async def _break_at(agent: Agent, at: int) -> int:
    stream = agent.stream_async("1 + 1?")
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == at:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return seen


async def _cancel_at(agent: Agent, at: int) -> int:
    seen = 0
    async for _ in agent.stream_async("1 + 1?"):
        seen += 1
        if seen == at:
            agent.cancel()
    return seen


async def _stop_everywhere(kind: str, stop: Callable[[Agent, int], Any]) -> None:
    """Stop an agent's second invocation at each event in turn, then run a third; each turn is exact or linked.

    The events are split between the two backends, which do not differ here.
    """
    for at in itertools.count(1 + BACKENDS.index(kind), len(BACKENDS)):
        script = Says(sums)
        model = model_of(kind, script)
        agent = agent_of(model)
        await agent.invoke_async("First?")
        assert len(model.ledger) == 2
        seen = await stop(agent, at)
        gc.collect()
        await asyncio.sleep(0)
        await idle(model.scripted)  # type: ignore[attr-defined]
        before = len(model.ledger)
        assert before <= 4
        await agent.invoke_async("And now?")
        assert len(model.ledger) > before
        assert_exact(model, script)
        assert_linked(model.ledger)
        if seen < at:
            assert at > 2
            assert_one_line(model.ledger, agent.messages)
            return


def assert_linked(ledger: Ledger) -> None:
    """Check that every turn continues the previous one or is a linked branch."""
    for turn in list(ledger)[1:]:
        branch = turn.draft.branch
        assert turn.parent == turn.index - 1 or (branch is not None and branch.turn is not None), turn


def assert_exact(model: TITOModel, script: Says) -> None:
    """Check that each prompt of the engine is the path before its turn and the turn's delta."""
    check_ledger(model.ledger)
    prompts = {request.request_id: list(request.prompt_ids) for request in script.requests}
    for turn in model.ledger:
        path = model.ledger.path_ids(turn.parent).tolist() + turn.draft.prompt_ids.tolist()
        assert prompts[turn.draft.engine.request_id] == path


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_turn_in_flight_during_a_reset_is_committed_to_its_own_ledger(kind: str) -> None:
    script = Says("One.", "Two.", "Three.", "Four.")
    model = model_of(kind, script, latency=0.02)
    agent, other = agent_of(model), agent_of(model)
    await agent.invoke_async("First?")
    waiting = asyncio.ensure_future(agent.invoke_async("Second?"))
    while not model.scripted.running:  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)
    sealed = model.reset()
    assert len(sealed) == 1
    assert len(model.ledger) == 0
    other_turn = asyncio.ensure_future(other.invoke_async("Another agent?"))
    await waiting
    await other_turn
    assert [turn.parent for turn in sealed] == [None, 0]
    assert [turn.parent for turn in model.ledger] == [None]
    await agent.invoke_async("Third?")
    assert [turn.parent for turn in model.ledger] == [None, None]
    assert model.ledger[1].draft.branch is not None
    assert model.ledger[1].draft.branch.reason == Reason.SEPARATE
    check_ledger(sealed)
    check_ledger(model.ledger)
    assert sealed.retained() == []


@pytest.mark.parametrize("kind", BACKENDS)
def test_resets_in_one_thread_and_turns_in_others_lose_and_mix_nothing(kind: str) -> None:
    model = model_of(kind, Says(sums), latency=0.001)
    sealed: list[Ledger] = []
    done = threading.Event()

    def reset() -> None:
        while not done.wait(0.005):
            sealed.append(model.reset())

    def work(number: int) -> int:
        agent = agent_of(model)
        for turn in range(4):
            agent(f"{number}-{turn}?")
        return sum(message["role"] == "assistant" for message in agent.messages)

    resetting = threading.Thread(target=reset)
    resetting.start()
    with ThreadPoolExecutor(4) as threads:
        answered = sum(threads.map(work, range(4)))
    done.set()
    resetting.join()
    sealed.append(model.ledger)
    for ledger in sealed:
        check_ledger(ledger)
    assert len({ledger.uuid for ledger in sealed}) == len(sealed)
    assert sum(len(ledger) for ledger in sealed) == answered == 32
