"""Middleware that changes calls and answers, so that Strands stores a history that the model never saw."""

from __future__ import annotations

from typing import Any

import pytest
from strands.middleware import InvokeModelStage

from support.conversations import answer, user
from support.histories import observe
from support.scripted import BACKENDS

pytestmark = pytest.mark.parametrize("kind", BACKENDS)


async def ask(agent: Any, *questions: str) -> None:
    for question in questions:
        await agent.invoke_async(question)


async def test_a_message_shown_for_one_call_only_is_left_out_of_the_next(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.")
    agent = rollout.agent()
    agent.add_middleware(
        InvokeModelStage.Input,
        lambda context: context.replace(messages=[*context.messages, user(f"({len(context.messages)} so far)")]),
    )
    await ask(agent, "First?", "Second?", "Third?")
    assert rollout.parents == [None, None, None]
    assert rollout.branches == {1: ("TRIM", 0, 1), 2: ("TRIM", 1, 3)}
    rollout.check()


async def test_a_system_prompt_for_one_call_only_is_a_new_opening(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.")
    agent = rollout.agent()
    agent.add_middleware(
        InvokeModelStage.Input,
        lambda context: context.replace(system_prompt=f"Be brief. Message {len(context.messages)}."),
    )
    await ask(agent, "First?", "Second?", "Third?")
    assert rollout.branches == {1: ("OPENING", 0, None), 2: ("OPENING", 1, None)}
    rollout.check()


async def test_an_answer_that_middleware_rewrites_is_an_edit_of_it(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.")
    agent = rollout.agent()

    async def rewrite(context: Any, next_fn: Any) -> Any:
        async for event in next_fn(context):
            if "stop" in event:
                event["stop"][1]["content"] = [{"text": "[filtered]"}]
            yield event

    agent.add_middleware(InvokeModelStage, rewrite)
    await ask(agent, "First?", "Second?")
    assert rollout.branches == {1: ("EDIT", 0, 1)}
    rollout.check()


async def test_middleware_that_calls_twice_is_a_retry(kind: str) -> None:
    rollout = observe(kind, "One.", "Uno.", "Two.", "Due.")
    agent = rollout.agent()

    async def twice(context: Any, next_fn: Any) -> Any:
        async for _ in next_fn(context):
            pass
        async for event in next_fn(context):
            yield event

    agent.add_middleware(InvokeModelStage, twice)
    await ask(agent, "First?", "Second?")
    assert rollout.parents == [None, None, 1, 1]
    assert rollout.branches == {1: ("RETRY", 0, 1), 3: ("RETRY", 1, 3)}
    rollout.check()


async def test_an_answer_that_middleware_drops_with_the_agents_key_has_no_agent(kind: str) -> None:
    rollout = observe(kind, "One.", "Lost.", "Two.")
    agent = rollout.agent()
    await ask(agent, "First?")
    fail = [True]

    async def guard(context: Any, next_fn: Any) -> Any:
        async for event in next_fn(context):
            yield event
        if fail:
            fail.pop()
            raise RuntimeError("guardrail")

    agent.add_middleware(InvokeModelStage, guard)
    with pytest.raises(RuntimeError, match="guardrail"):
        await ask(agent, "Second?")
    await ask(agent, "Third?")
    # Strands rolled the key back: to the agent, turn 1 was never its own.
    assert rollout.parents == [None, 0, 0]
    assert rollout.branches == {2: ("SEPARATE", 0, None)}
    rollout.check()


async def test_a_round_inserted_by_hand_is_an_edit(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.")
    agent = rollout.agent()
    await ask(agent, "First?")
    agent.messages += [user("Second?"), answer("From a cache.")]
    await ask(agent, "Third?", "Fourth?")
    assert rollout.parents == [None, None, 1]
    assert rollout.branches == {1: ("EDIT", 0, 2)}
    rollout.check()
