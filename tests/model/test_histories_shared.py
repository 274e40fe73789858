"""Several agents and side calls on one model: each its own path, and every branch says whose it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from strands import Agent
from strands.multiagent import GraphBuilder, Swarm

from support.conversations import asked
from support.histories import watched
from support.scripted import BACKENDS, END, call, ids_of, tokenizer
from tito_core.model import SeveralTrajectoriesError

pytestmark = pytest.mark.parametrize("kind", BACKENDS)


def same_for_everybody(request: Any) -> str:
    """Call a tool after a question, and answer after its result; nothing is remembered between requests."""
    asked_for = (
        tokenizer()
        .decode(list(request.prompt_ids))
        .rstrip()
        .endswith("What is the answer?<|im_end|>\n<|im_start|>assistant")
    )
    return "Same." if asked_for else call("add", '{"a": 1, "b": 2}')


async def test_eight_identical_agents_at_temperature_nought_stay_eight(kind: str) -> None:
    it = watched(kind, same_for_everybody, latency=0.01, sampling={"temperature": 0})
    agents = [it.agent() for _ in range(8)]
    for _ in range(2):
        await asyncio.gather(*(agent.invoke_async("Hello?") for agent in agents))
    trajectories = it.check(in_order=False)
    assert [len(trajectory.turns) for trajectory in trajectories] == [4] * 8
    assert len({trajectory.turns[0] for trajectory in trajectories}) == 8
    assert len({tuple(trajectory.token_ids.tolist()) for trajectory in trajectories}) == 1
    assert set(it.branches.values()) == {("SEPARATE", None, None)}
    assert len(it.branches) == 7


async def test_equal_text_from_different_ids_is_told_apart_by_the_agents_own_keys(kind: str) -> None:
    whole, split = ids_of("Hello there" + END), ids_of("Hello") + ids_of(" the") + ids_of("re") + ids_of(END)
    assert whole != split
    it = watched(kind, whole, split, "One.", "Two.")
    first, second = it.agent(), it.agent()
    for agent in (first, second, first, second):
        await agent.invoke_async("Hi?")
    assert it.parents == [None, None, 0, 1]
    assert it.branches == {1: ("SEPARATE", None, None)}
    it.check()


async def test_an_agent_restored_from_a_snapshot_shares_the_path_before_it(kind: str) -> None:
    it = watched(kind, "One.", "Two.", "Three.", "Four.", "Five.")
    first = it.agent()
    await first.invoke_async("First?")
    saved = first.take_snapshot(preset="session")
    copies = [it.agent() for _ in range(3)]
    for copy in copies:
        copy.load_snapshot(saved)
        await copy.invoke_async("Second?")
    await first.invoke_async("Second?")
    assert it.parents == [None, 0, 0, 0, 0]
    assert it.branches == {2: ("SEPARATE", 0, None), 3: ("SEPARATE", 0, None), 4: ("SEPARATE", 0, None)}
    it.check()


async def test_a_side_call_is_a_root_of_its_own_and_the_agent_goes_on(kind: str) -> None:
    it = watched(kind, "One.", "A summary.", "Two.")
    agent = it.agent()
    await agent.invoke_async("First?")
    async for _ in it.model.stream([asked("Sum it up.")], None, "You sum up."):
        pass
    await agent.invoke_async("Second?")
    assert it.parents == [None, None, 0]
    assert it.branches == {1: ("SIDE_CALL", None, None)}
    it.check()


async def test_a_side_call_with_the_agents_own_opening_forks_and_says_so(kind: str) -> None:
    it = watched(kind, "One.", "Two.", "A summary.", "Another.", "Three.")
    agent = it.agent(tools=[])
    await agent.invoke_async("First?")
    await agent.invoke_async("Second?")
    for question in ("Sum it up.", "Second?"):
        async for _ in it.model.stream([*agent.messages[:2], asked(question)], None, "Be brief."):
            pass
    await agent.invoke_async("Third?")
    assert it.parents == [None, 0, 0, 0, 1]
    assert it.branches == {2: ("SIDE_CALL", 0, None), 3: ("SIDE_CALL", 0, None)}
    it.check()


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_sub_agent_as_a_tool_on_the_same_model_is_a_separate_root(kind: str, keeps: bool) -> None:
    it = watched(
        kind,
        call("helper", '{"input": "One?"}'),
        "Helped.",
        call("helper", '{"input": "Two?"}'),
        "Helped again.",
        "Done.",
    )
    inner = it.agent(name="helper", tools=[], system_prompt="Help.")
    outer = it.agent(tools=[inner.as_tool(preserve_context=keeps)])
    await outer.invoke_async("Get help.")
    assert it.parents == [None, None, 0, 1 if keeps else None, 2]
    # Without its context it starts over each time, though Strands leaves it its key.
    assert it.branches == {1: ("SEPARATE", None, None)} | ({} if keeps else {3: ("REWIND", 1, 0)})
    it.check()


async def test_a_graph_of_agents_on_one_model(kind: str) -> None:
    it = watched(kind, "Planned.", "Checked.", "Written.", latency=0.01)
    builder = GraphBuilder()
    for name in ("plan", "check", "write"):
        builder.add_node(it.agent(name=name, tools=[]), name)
    builder.add_edge("plan", "check")
    builder.add_edge("plan", "write")
    graph = builder.set_execution_timeout(60).build()
    for _ in range(2):
        await graph.invoke_async("Do it.")
    assert sorted(it.parents[3:]) == [0, 1, 2], "each node goes on in its own path"
    assert it.parents[:3] == [None] * 3
    assert {branch[0] for branch in it.branches.values()} == {"SEPARATE"}
    it.check(in_order=False)


async def test_a_swarm_of_agents_on_one_model(kind: str) -> None:
    handoff = call("handoff_to_agent", '{"agent_name": "writer", "message": "Write it."}')
    it = watched(kind, handoff, "Handed over.", "Written.")
    planner, writer = (it.agent(name=name, tools=[]) for name in ("planner", "writer"))
    result = await Swarm([planner, writer]).invoke_async("Do it.")
    assert str(result.status).endswith("COMPLETED")
    assert [parent for parent in it.parents if parent is None] == [None, None]
    assert {branch[0] for branch in it.branches.values()} == {"SEPARATE"}
    it.check(in_order=False)


async def test_one_trajectory_is_refused_where_there_are_several_and_all_are_listed(kind: str) -> None:
    it = watched(kind, "One.", "Two.", "Three.")
    agent = it.agent()
    await agent.invoke_async("First?")
    assert it.model.trajectory.turns == (0,)
    agent.messages[0] = asked("First, edited?")
    await agent.invoke_async("Second?")
    await Agent(model=it.model, callback_handler=None).invoke_async("Hi?")
    with pytest.raises(SeveralTrajectoriesError, match="3 trajectories") as caught:
        _ = it.model.trajectory
    message = str(caught.value)
    assert "edit, from turn 0, at message 0" in message
    assert "separate agent" in message
    assert [f"turn {index} " in message for index in range(3)] == [True] * 3
    it.check()
