"""Concurrent agents, threads, event loops, invocations and resets; and invocations that stop half-way."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from strands import Agent
from strands.types.agent import ConcurrentInvocationMode

from support.histories import add
from support.scripted import END, Says, call, engine_of, ids_of, model_of, tokenizer
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


def assert_lines_apart(ledger: Ledger, count: int, turns: int) -> None:
    """Check that a ledger has `count` trajectories without common turns, of `turns` turns each."""
    check_ledger(ledger)
    lines = ledger.trajectories()
    assert [len(line.turns) for line in lines] == [turns] * count
    assert len(ledger) == count * turns


def test_identical_agents_in_threads_stay_apart_through_the_synchronous_api() -> None:
    with ScriptedServer(engine_of("vllm", Says(sums), latency=lambda prompt: prompt.number % 3 * 0.002)) as server:
        model = TITOModel(backend="vllm", base_url=server.base_url, tokenizer=tokenizer())
        agents = [agent_of(model) for _ in range(6)]
        with ThreadPoolExecutor(6) as threads:
            for _ in range(3):
                list(threads.map(lambda agent: agent("1 + 1?"), agents))
        assert_lines_apart(model.ledger, 6, 6)


def test_a_loop_that_is_closed_under_a_turn_is_forgotten_quietly() -> None:
    model = model_of("vllm", Says("One."), latency=lambda prompt: 0.0 if prompt.number else 60.0)
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Task[Any]:
        task = asyncio.ensure_future(anext(model.stream([{"role": "user", "content": [{"text": "Hi?"}]}])))
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


@pytest.mark.parametrize("count", [2, 3, 5])
async def test_reentrant_invocations_of_one_agent_are_exact_or_linked(count: int) -> None:
    script = Says("Fine.")
    model = model_of("vllm", script, latency=lambda prompt: 0.002 + prompt.number * 7 % 5 * 0.004)
    agent = agent_of(model, concurrent_invocation_mode=ConcurrentInvocationMode.UNSAFE_REENTRANT)
    for number in range(3):
        await asyncio.gather(*(agent.invoke_async(f"{number}-{which}?") for which in range(count)))
    await agent.invoke_async("And now?")
    assert_exact(model, script)
    assert len(model.ledger) == 3 * count + 1
    roots = [turn for turn in model.ledger if turn.parent is None]
    assert all(turn.draft.branch is not None for turn in roots[1:])


def assert_exact(model: TITOModel, script: Says) -> None:
    """Check that each prompt of the engine is the path before its turn and the turn's delta."""
    check_ledger(model.ledger)
    prompts = {request.request_id: list(request.prompt_ids) for request in script.requests}
    for turn in model.ledger:
        path = model.ledger.path_ids(turn.parent).tolist() + turn.draft.prompt_ids.tolist()
        assert prompts[turn.draft.engine.request_id] == path


async def test_a_turn_in_flight_during_a_reset_is_committed_to_its_own_ledger() -> None:
    script = Says("One.", "Two.", "Three.", "Four.")
    model = model_of("sglang", script, latency=0.02)
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


def test_resets_in_one_thread_and_turns_in_others_lose_and_mix_nothing() -> None:
    model = model_of("vllm", Says(sums), latency=0.001)
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
