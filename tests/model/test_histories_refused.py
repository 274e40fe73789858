"""`history="error"`: an agent's own change raises before anything is sent; calls of others do not."""

from __future__ import annotations

from typing import Any

import pytest
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import AfterModelCallEvent

from support.conversations import answer, user
from support.histories import ObservedRollout, observe
from tito_core.turn.branch import HistoryChangedError


async def two_turns(**options: Any) -> tuple[ObservedRollout, Any]:
    rollout = observe("sglang", "One.", "Two.", "Three.", history="error", **options)
    agent = rollout.agent()
    await agent.invoke_async("First?")
    await agent.invoke_async("Second?")
    return rollout, agent


def edit(agent: Any) -> None:
    agent.messages[2] = user("Second, redacted?" + "x" * 44)


def redact(agent: Any) -> None:
    agent.messages[0]["content"] = [{"text": "[gone]"}, {"text": "all"}]


def edit_answer(agent: Any) -> None:
    agent.messages[1] = answer("Eins.")


def pop(agent: Any) -> None:
    del agent.messages[2:]


def clear(agent: Any) -> None:
    agent.messages.clear()


def trim(agent: Any) -> None:
    del agent.messages[:2]


def summarise(agent: Any) -> None:
    agent.messages[:3] = [user("So far: nothing.")]


def summarise_two(agent: Any) -> None:
    agent.messages[:2] = [user("So far: nothing.")]


def trim_without_the_answer(agent: Any) -> None:
    agent.messages[:] = agent.messages[2:3]


def say_again(agent: Any) -> None:
    agent.messages[2:2] = agent.messages[:2]


def call_directly(agent: Any) -> None:
    agent.tool.add(a=1, b=2)


def prompt(agent: Any) -> None:
    agent.system_prompt = "Be long."


def tools(agent: Any) -> None:
    agent.tool_registry.registry.clear()


CHANGES = [
    (
        edit,
        r"message 2 \(user\) changed .*'Second\?'.*'Second, redacted\?x{43}\.\.\.' \(edit, from turn 0, at message 2\)",
    ),
    (redact, r"message 0 \(user\) changed .*'First\?'.*'\[gone\] all' \(edit, from turn 1, at message 0\)"),
    (edit_answer, r"message 1 \(assistant\) changed .*'One\.'.*'Eins\.' \(edit, from turn 1, at message 1\)"),
    (pop, r"message 2 \(user\) changed .*'Second\?'.*'Third\?' \(rewind, from turn 0, at message 2\)"),
    (clear, r"message 0 \(user\) changed .*'First\?'.*'Third\?' \(rewind, from turn 1, at message 0\)"),
    (trim, r"message 0 \(user\) changed .*'First\?'.*'Second\?' \(trim, from turn 1, at message 0\)"),
    (
        summarise,
        r"message 0 \(user\) changed .*'First\?'.*'So far: nothing\.' \(summary, from turn 1, at message 0\)",
    ),
    (summarise_two, r"message 0 \(user\) changed .* \(summary, from turn 1, at message 0\)"),
    (
        trim_without_the_answer,
        r"message 0 \(user\) changed .*'First\?'.*'Second\?' \(trim, from turn 1, at message 0\)",
    ),
    (say_again, r"message 2 \(user\) changed .*'Second\?'.*'First\?' \(edit, from turn 0, at message 2\)"),
    (
        call_directly,
        r"message 5 \(assistant\) was not sampled here: '[^']*add[^']*' \(edit, from turn 1, at message 4\)",
    ),
    (prompt, r"the system prompt changed \(new system prompt or tools \(system prompt\), from turn 1\)"),
    (tools, r"the tools changed"),
]


@pytest.mark.parametrize(("change", "pattern"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
async def test_each_change_raises_before_anything_is_sent(change: Any, pattern: str) -> None:
    rollout, agent = await two_turns()
    change(agent)
    with pytest.raises(HistoryChangedError, match=pattern):
        await agent.invoke_async("Third?")
    assert len(rollout.script.requests) == 2
    assert rollout.parents == [None, 0]
    rollout.check()


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_retry_names_the_answer_that_it_repeats(depth: int) -> None:
    rollout, agent = await two_turns()
    del agent.messages[depth:]
    named = rf"message {depth + 1} \(assistant\) would be sampled again: '(One|Two)\..*model\.reset\(\).*history='fork'"
    with pytest.raises(HistoryChangedError, match=named):
        await agent.invoke_async("Second?" if depth else "First?")
    assert len(rollout.script.requests) == 2


async def test_an_answer_that_is_asked_for_again_without_a_question_is_missing() -> None:
    rollout, agent = await two_turns()
    del agent.messages[2:]
    with pytest.raises(HistoryChangedError, match=r"message 2 \(user\) is missing: 'Second\?' \(rewind, from turn 0"):
        await agent.invoke_async(None)
    assert len(rollout.script.requests) == 2


async def test_a_hooks_retry_is_refused() -> None:
    rollout, agent = await two_turns()
    again = [True]
    agent.hooks.add_callback(AfterModelCallEvent, lambda event: setattr(event, "retry", bool(again and again.pop())))
    with pytest.raises(HistoryChangedError, match=r"message 5 \(assistant\) .*: 'Three\.'"):
        await agent.invoke_async("Third?")
    assert rollout.parents == [None, 0, 1]


async def test_the_window_is_refused() -> None:
    rollout = observe("sglang", *(f"Answer {i}." for i in range(3)), history="error")
    agent = rollout.agent(conversation_manager=SlidingWindowConversationManager(window_size=4))
    for i in range(3):
        await agent.invoke_async(f"Question {i}?")
    with pytest.raises(HistoryChangedError, match=r"trim, from turn 2, at message 0"):
        await agent.invoke_async("Question 3?")
    assert len(rollout.script.requests) == 3


async def test_a_change_that_is_undone_continues() -> None:
    rollout, agent = await two_turns()
    edit(agent)
    with pytest.raises(HistoryChangedError):
        await agent.invoke_async("Third?")
    agent.messages[2] = user("Second?")
    await agent.invoke_async("Third, then?")
    assert rollout.parents == [None, 0, 1]
    assert len(rollout.check()) == 1


async def test_separate_agents_and_side_calls_do_not_raise() -> None:
    rollout, agent = await two_turns()
    other = rollout.agent()
    await other.invoke_async("First?")
    seeded = rollout.agent(messages=[*agent.messages[:2]])
    await seeded.invoke_async("Second, otherwise?")
    edited = rollout.agent(messages=[*agent.messages[:2], user("Second?"), answer("Zwei.")])
    await edited.invoke_async("Third?")
    for messages in ([user("Sum up.")], [*agent.messages[:2], user("Sum up.")], [*agent.messages[:3]]):
        async for _ in rollout.model.stream(messages, [*agent.tool_registry.get_all_tool_specs()], "Be brief."):
            pass
    await agent.invoke_async("Third?")
    reasons = [reason for reason, _, _ in rollout.branches.values()]
    assert reasons == ["SEPARATE", "SEPARATE", "SEPARATE", "SIDE_CALL", "SIDE_CALL", "SIDE_CALL"]
    assert rollout.parents == [None, 0, None, 0, None, None, 0, 0, 1]
    rollout.check()
