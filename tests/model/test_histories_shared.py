"""Several agents and side calls on one model: each has its own path, with the right branch reason."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from strands import Agent

from support.conversations import user
from support.histories import observe
from support.scripted import call, tokenizer
from tito_core.model import SeveralTrajectoriesError


def same_for_everybody(request: Any) -> str:
    """Call a tool after a user message, and answer after its result, without state between requests."""
    asked_for = (
        tokenizer()
        .decode(list(request.prompt_ids))
        .rstrip()
        .endswith("What is the answer?<|im_end|>\n<|im_start|>assistant")
    )
    return "Same." if asked_for else call("add", '{"a": 1, "b": 2}')


async def test_eight_identical_agents_at_temperature_nought_stay_eight() -> None:
    rollout = observe("sglang", same_for_everybody, latency=0.01, sampling={"temperature": 0})
    agents = [rollout.agent() for _ in range(8)]
    for _ in range(2):
        await asyncio.gather(*(agent.invoke_async("Hello?") for agent in agents))
    trajectories = rollout.check(in_order=False)
    assert [len(trajectory.turns) for trajectory in trajectories] == [4] * 8
    assert len({trajectory.turns[0] for trajectory in trajectories}) == 8
    assert len({tuple(trajectory.token_ids.tolist()) for trajectory in trajectories}) == 1
    assert set(rollout.branches.values()) == {("SEPARATE", None, None)}
    assert len(rollout.branches) == 7


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_sub_agent_as_a_tool_on_the_same_model_is_a_separate_root(keeps: bool) -> None:
    rollout = observe(
        "sglang",
        call("helper", '{"input": "One?"}'),
        "Helped.",
        call("helper", '{"input": "Two?"}'),
        "Helped again.",
        "Done.",
    )
    inner = rollout.agent(name="helper", tools=[], system_prompt="Help.")
    outer = rollout.agent(tools=[inner.as_tool(preserve_context=keeps)])
    await outer.invoke_async("Get help.")
    assert rollout.parents == [None, None, 0, 1 if keeps else None, 2]
    # Without its context it starts over each time, though Strands leaves it its key.
    assert rollout.branches == {1: ("SEPARATE", None, None)} | ({} if keeps else {3: ("REWIND", 1, 0)})
    rollout.check()


async def test_trajectory_raises_with_several_and_lists_them() -> None:
    rollout = observe("sglang", "One.", "Two.", "Three.")
    agent = rollout.agent()
    await agent.invoke_async("First?")
    assert rollout.model.trajectory.turns == (0,)
    agent.messages[0] = user("First, edited?")
    await agent.invoke_async("Second?")
    await Agent(model=rollout.model, callback_handler=None).invoke_async("Hi?")
    with pytest.raises(SeveralTrajectoriesError, match="3 trajectories") as caught:
        _ = rollout.model.trajectory
    message = str(caught.value)
    assert "model.trajectories" in message
    assert "edit, from turn 0, at message 0" in message
    assert "separate agent" in message
    assert [f"turn {index} " in message for index in range(3)] == [True] * 3
    rollout.check()
