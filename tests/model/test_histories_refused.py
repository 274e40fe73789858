"""`history="error"`: an agent's own change raises before anything is sent; calls of others do not."""

from __future__ import annotations

from typing import Any

import pytest

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
