"""Sampled reasoning that the template strips: kept on the path, or a branch from the template's rendering."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.hooks import AfterModelCallEvent, BeforeModelCallEvent

from support.histories import ObservedRollout, add, observe
from support.scripted import policy_of, tokenizer
from tito_core import store
from tito_core.turn.branch import HistoryChangedError

NAME = "qwen3-tiny"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def thought(words: str, then: str) -> str:
    return f"<think>\n{words}\n</think>\n\n{then}"


def watch(*answers: str, thinking: str = "as-template", **options: Any) -> ObservedRollout:
    return observe("sglang", *answers, name=NAME, thinking=thinking, **options)


def prompts(rollout: ObservedRollout) -> list[str]:
    return [tokenizer(NAME).decode(list(request.prompt_ids)) for request in rollout.script.requests]


def rendered(rollout: ObservedRollout) -> list[str]:
    """Return the template's full rendering of each model call."""
    specs = [add.tool_spec]
    shown = ((call.messages, call.system, specs if call.tools else None) for call in rollout.shown)
    template = policy_of("vllm", NAME).template
    return [str.__str__(template.rendering.of_messages(*each)) for each in shown]


async def ask(agent: Any, *questions: str) -> None:
    for question in questions:
        await agent.invoke_async(question)


async def test_reasoning_in_a_roots_prompt_is_stripped_later() -> None:
    rollout = watch(thought("Hm one.", CALL), "Three.", "Four.", "Fine.")
    agent = rollout.agent()
    await ask(agent, "Add?")
    agent.messages[0]["content"] = [{"text": "Add, please?"}]
    del agent.messages[3:]  # so that the next turn is a root in mid round
    await agent.invoke_async([])
    await ask(agent, "Sure?")
    assert rollout.parents == [None, 0, None, None]
    assert rollout.branches == {2: ("EDIT", 1, 0), 3: ("THINKING", 2, 1)}
    assert "Hm one." in prompts(rollout)[2]
    assert prompts(rollout) == rendered(rollout)


async def test_a_retry_and_a_rewind_have_their_reasons() -> None:
    rollout = watch(thought("Hm.", "One."), "Two.", "Dos.", "Other.")
    agent = rollout.agent()
    await ask(agent, "First?")
    again = [True]
    agent.hooks.add_callback(AfterModelCallEvent, lambda event: setattr(event, "retry", bool(again and again.pop())))
    await ask(agent, "Second?")
    del agent.messages[2:]
    await ask(agent, "Another?")
    assert rollout.parents == [None, None, None, None]
    assert rollout.branches == {1: ("THINKING", 0, 1), 2: ("RETRY", 0, 3), 3: ("REWIND", 0, 2)}
    assert prompts(rollout) == rendered(rollout)
    rollout.check()


async def test_agents_that_left_the_same_turn_stay_apart() -> None:
    rollout = watch(thought("Hm.", "One."), "Two.", "Dos.", "Tres.")
    one = rollout.agent()
    await ask(one, "First?")
    two = rollout.agent(messages=list(one.messages))
    three = rollout.agent(messages=list(one.messages))
    three._model_state = dict(one._model_state)
    for agent in (one, two, three):
        await ask(agent, "Second?")
    assert rollout.parents == [None] * 4
    assert rollout.branches == {1: ("THINKING", 0, 1), 2: ("SEPARATE", 0, None), 3: ("SEPARATE", 0, None)}
    rollout.check()


async def test_reasoning_that_the_template_strips_is_not_a_change_by_the_agent() -> None:
    rollout = watch(thought("Hm.", "One."), thought("Hm.", "Two."), "Three.", history="error")
    agent = rollout.agent()
    await ask(agent, "First?", "Second?")
    assert rollout.branches == {1: ("THINKING", 0, 1)}
    del agent.messages[2:]
    with pytest.raises(HistoryChangedError, match="rewind"):
        await ask(agent, "Another?")
    assert len(rollout.model.ledger) == 2


async def test_a_loaded_ledger_is_continued(tmp_path: Any) -> None:
    rollout = watch(thought("Hm.", CALL), "Three.")
    agent = rollout.agent()
    await ask(agent, "Add?")
    path = tmp_path / "rollouts.tito"
    store.append(path, [rollout.model.ledger])
    (loaded,) = store.read(path)
    later = watch("Fine.", ledger=loaded)
    resumed = later.agent(messages=list(agent.messages))
    resumed._model_state = dict(agent._model_state)
    await ask(resumed, "Sure?")
    assert later.parents == [None, 0, None]
    assert later.branches == {2: ("THINKING", 1, 1)}
    assert prompts(later) == rendered(later)


@pytest.mark.parametrize("beside", ["One.", ""])
async def test_thinking_that_a_hook_strips_is_named(beside: str) -> None:
    rollout = watch(thought("Hm.", beside), thought("So.", "Two."), "Three.", thinking="keep")
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


ANSWERS = st.lists(
    st.tuples(st.sampled_from(["", "Hm.", "Hm hm\nso."]), st.sampled_from(["So.", "Well: é."]), st.integers(0, 2)),
    min_size=1,
    max_size=4,
)


def test_every_prompt_is_the_templates_rendering_whatever_the_reasoning() -> None:
    @settings(deadline=None, max_examples=15)
    @given(ANSWERS)
    def holds(rounds: list[tuple[str, str, int]]) -> None:
        spoken = [(words, then) for words, text, calls in rounds for then in [CALL] * calls + [text]]
        answers = [thought(words, then) if words else then for words, then in spoken]
        rollout = watch(*answers)
        asyncio.run(ask(rollout.agent(), *(f"Question {i}?" for i in range(len(rounds)))))
        assert prompts(rollout) == rendered(rollout)
        strips = [i for i, (words, _, _) in enumerate(rounds[:-1]) if words]
        assert [branch[0] for branch in rollout.branches.values()] == ["THINKING"] * len(strips)
        rollout.check()

    holds()


def test_keep_makes_one_path_whatever_the_reasoning() -> None:
    @settings(deadline=None, max_examples=10)
    @given(ANSWERS)
    def holds(rounds: list[tuple[str, str, int]]) -> None:
        answers = [thought(words, then) for words, text, calls in rounds for then in [CALL] * calls + [text]]
        rollout = watch(*answers, thinking="keep")
        asyncio.run(ask(rollout.agent(), *(f"Question {i}?" for i in range(len(rounds)))))
        assert len(rollout.model.trajectories) == 1
        rollout.check()

    holds()
