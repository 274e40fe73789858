"""Histories that start with messages that were not sampled here are exact."""

from __future__ import annotations

from typing import Any

import pytest

from support.conversations import answer, calls, results, user
from support.histories import observe
from support.scripted import call

SEEDS: dict[str, Any] = {
    "text": [user("Hi?"), answer("Hello.")],
    "several blocks": [
        user("One,", "two?"),
        {"role": "assistant", "content": [{"text": "Three,"}, {"text": "four."}]},
    ],
    "calls only": [user("Add."), *calls(("add", {"a": 1, "b": 2})), results("3"), answer("Three.")],
    "text and calls": [user("Add."), *calls(("add", {"a": 1}), ("add", {}), text="So:"), results("3", {"x": [1]})],
    "reasoning": [user("Hi?"), answer("Hello.", "They greet me.")],
    "reasoning and calls": [user("Add."), *calls(("add", {"a": 1, "b": 2}), reasoning="Hm."), results("3")],
    "blank answer": [user("Hi?"), {"role": "assistant", "content": [{"text": " "}]}],
    "no answer": [user("Hi?"), user("Anyone?")],
    "reasoning only": [
        user("Hi?"),
        {"role": "assistant", "content": [{"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "s"}}}]},
    ],
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["smollm2", "qwen3-tiny"])
async def test_a_seeded_history_is_the_first_prompt_and_is_continued(seed: str, name: str) -> None:
    rollout = observe("vllm", "One.", call("add", '{"a": 1, "b": 2}'), "Three.", name=name)
    agent = rollout.agent(messages=[*SEEDS[seed]])
    await agent.invoke_async("First?")
    await agent.invoke_async("Second?")
    assert rollout.parents == [None, 0, 1]
    assert rollout.branches == {}
    assert len(rollout.check()) == 1


async def test_an_agent_seeded_with_anothers_edited_history_is_linked_to_where_they_part() -> None:
    rollout = observe("vllm", "One.", "Two.", "Other.")
    first = rollout.agent()
    await first.invoke_async("First?")
    await first.invoke_async("Second?")
    second = rollout.agent(messages=[*first.messages[:3], answer("Two, I am told.")])
    await second.invoke_async("Other?")
    assert rollout.branches == {2: ("SEPARATE", 0, 3)}
    rollout.check()
