"""New system prompts or tools, stripped reasoning, numbers of other types: each is detected from the content."""

from __future__ import annotations

from typing import Any

import pytest
from strands import tool
from strands.hooks import BeforeModelCallEvent

from support.histories import observe
from support.scripted import BACKENDS, call

pytestmark = pytest.mark.parametrize("kind", BACKENDS)


async def ask(agent: Any, *questions: str) -> None:
    for question in questions:
        await agent.invoke_async(question)


async def test_a_new_system_prompt_or_tool_between_invocations_is_a_new_opening(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.", "Four.", "Five.")
    agent = rollout.agent()

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    await ask(agent, "First?")
    agent.system_prompt = "Be long."
    await ask(agent, "Second?")
    agent.tool_registry.process_tools([look])
    await ask(agent, "Third?", "Fourth?")
    assert rollout.parents == [None, None, None, 2]
    assert rollout.branches == {1: ("OPENING", 0, None), 2: ("OPENING", 1, None)}
    details = [turn.draft.branch.detail for turn in rollout.model.ledger if turn.draft.branch is not None]
    assert details == ["system prompt", "tools"]
    agent.system_prompt = "Be brief."
    agent.tool_registry.registry.pop("look")
    agent.tool_registry.dynamic_tools.pop("look", None)
    del agent.messages[2:]
    await ask(agent, "Second?")
    assert rollout.parents[-1] == 0, "the first opening is back, and its turn was never extended"
    rollout.check()


async def test_a_system_prompt_or_tool_that_changes_within_an_invocation_is_a_new_opening(kind: str) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    rollout = observe(kind, call("add", '{"a": 1, "b": 2}'), call("look", "{}"), "Three.")
    agent = rollout.agent()

    def change(event: BeforeModelCallEvent) -> None:
        if len(event.agent.messages) == 3:
            event.agent.tool_registry.process_tools([look])
        if len(event.agent.messages) == 5:
            event.agent.system_prompt = "Be long."

    agent.hooks.add_callback(BeforeModelCallEvent, change)
    await ask(agent, "First?")
    assert rollout.parents == [None, None, None]
    assert rollout.branches == {1: ("OPENING", 0, None), 2: ("OPENING", 1, None)}
    rollout.check()


@pytest.mark.parametrize(("name", "beside"), [("qwen3-tiny", "One."), ("qwen3-tiny", "")])
async def test_thinking_that_a_hook_strips_is_named(kind: str, name: str, beside: str) -> None:
    rollout = observe(
        kind, f"<think>\nHm.\n</think>\n\n{beside}", "<think>\nSo.\n</think>\n\nTwo.", "Three.", name=name
    )
    agent = rollout.agent()

    def strip(event: BeforeModelCallEvent) -> None:
        for message in event.agent.messages:
            message["content"] = [block for block in message["content"] if "reasoningContent" not in block]

    await ask(agent, "First?")
    assert "reasoningContent" in agent.messages[1]["content"][0]
    agent.hooks.add_callback(BeforeModelCallEvent, strip)
    await ask(agent, "Second?", "Third?")
    assert rollout.parents == [None, None, None]
    assert rollout.branches == {1: ("THINKING", 0, 1), 2: ("THINKING", 1, 3)}
    rollout.check()


@pytest.mark.parametrize("value", [1, 1.0, True])
async def test_one_and_one_point_zero_and_true_are_three_inputs(kind: str, value: Any) -> None:
    rollout = observe(kind, call("add", '{"a": 1, "b": 2}'), "Three.", "More.")
    agent = rollout.agent()
    await ask(agent, "1 + 2?")
    agent.messages[1]["content"][0]["toolUse"]["input"]["a"] = value
    await ask(agent, "And?")
    same = type(value) is int
    assert rollout.parents == [None, 0, 1 if same else None]
    assert rollout.branches == ({} if same else {2: ("EDIT", 1, 1)})
    rollout.check()


async def test_an_opening_that_is_back_is_linked_to_its_own_turn(kind: str) -> None:
    """The parent is the last turn under that opening, not the agent's own last turn."""
    rollout = observe(kind, "One.", "Two.", "Three.", "Four.")
    agent = rollout.agent()
    await ask(agent, "First?")
    first = [*agent.messages]
    await ask(agent, "Second?")
    agent.system_prompt = "Be long."
    agent.messages[:] = []
    await ask(agent, "Other?")
    agent.system_prompt = "Be brief."
    agent.messages[:] = first
    await ask(agent, "Again?")
    assert rollout.parents == [None, 0, None, 0]
    assert rollout.branches[3][:2] == ("OPENING", 0)
    rollout.check()
