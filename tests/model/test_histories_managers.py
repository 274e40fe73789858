"""Strands' conversation managers and retries: each turn is exact or a linked branch."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager

from support.conversations import answer, calls, results, user
from support.histories import add, observe
from support.scripted import Says, backend_of, call, engine_of, tokenizer
from tito_core import Policy
from tito_core.termination import Termination, termination_of
from tito_core.turn.request import TrimmedHistoryError, _missing


@tool
def read(page: int) -> str:
    """Read a page.

    Args:
        page: Which.
    """
    return f"page {page}: " + " ".join(f"word{i}" for i in range(150))


async def test_the_default_window_trims_after_forty_messages_and_each_trim_is_a_root() -> None:
    rollout = observe("sglang", *(f"Answer {i}." for i in range(24)))
    agent = rollout.agent()
    for i in range(24):
        await agent.invoke_async(f"Question {i}?")
    assert len(agent.messages) == 40
    # The window is applied after the 21st answer and after each later one.
    assert rollout.parents == [None, *range(20), None, None, None]
    assert rollout.branches == {21: ("TRIM", 20, 0), 22: ("TRIM", 21, 0), 23: ("TRIM", 22, 0)}
    trajectories = rollout.check()
    assert [len(trajectory.turns) for trajectory in trajectories] == [21, 1, 1, 1]


NO_QUESTION = (
    "{%- if not messages|selectattr('role', 'eq', 'user')|list -%}{{- raise_exception('No user query found.') -}}"
    "{%- endif -%}"
)
"""As Qwen3.5's template refuses a history without a question."""


@pytest.mark.parametrize("pinned", [None, 1])
async def test_a_trimmed_history_that_the_template_cannot_show_is_named_and_ends_for_context(
    pinned: int | None,
) -> None:
    made = copy(tokenizer())
    made.chat_template = NO_QUESTION + made.chat_template
    says = Says(*[call("add", f'{{"a": {i}, "b": 1}}') for i in range(6)], "Done.")
    policy = Policy.connect(backend=backend_of(engine_of("sglang", says), "sglang"), tokenizer=made)
    model = policy.model()
    manager = SlidingWindowConversationManager(window_size=6, per_turn=True, pin_first=pinned)
    agent = Agent(model=model, tools=[add], conversation_manager=manager, callback_handler=None)
    if pinned:
        await agent.invoke_async("Count.")
        assert len(model.ledger) == 7
        return
    with pytest.raises(Exception) as caught:  # Strands wraps errors of later calls
        await agent.invoke_async("Count.")
    error = caught.value if isinstance(caught.value, TrimmedHistoryError) else caught.value.__cause__
    assert isinstance(error, TrimmedHistoryError)
    assert "lacks the user's question before message 0 (assistant)" in str(error)
    assert "No user query found" in str(error)
    assert "SlidingWindowConversationManager(pin_first=1)" in str(error)
    assert termination_of(caught.value, model.ledger) is Termination.CONTEXT
    assert len(says.requests) == len(model.ledger) == 3


def test_what_a_history_lacks_is_named() -> None:
    [called], shown = calls(("look", {})), results("a")
    call_id = called["content"][0]["toolUse"]["toolUseId"]
    assert _missing([user("a"), called, shown, answer("b"), user("c")]) is None
    assert _missing([answer("b"), user("c")]) == "the user's question before message 0 (assistant)"
    assert _missing([shown, answer("b")]) == "the user's question before message 0 (user)"
    assert _missing([user("a"), shown]) == f"the call of the tool result {call_id!r} in message 1"
    assert _missing([user("a"), called, user("b")]) == f"the result of the tool call {call_id!r} before message 2"


async def test_on_overflow_the_oldest_result_is_truncated_in_place_and_then_messages_are_trimmed() -> None:
    answers = [call("read", f'{{"page": {i}}}') for i in range(4)]
    rollout = observe("sglang", *answers, "Done.", "Well.", max_model_len=2300, sampling={"max_new_tokens": 60})
    agent = rollout.agent(tools=[read])
    await agent.invoke_async("Read it all.")
    held = str(agent.messages)
    assert "[truncated:" in held
    first = next(iter(rollout.branches.values()))
    assert first == ("EDIT", 0, 2), "the first result was truncated, and turn 0 asked for it"
    assert {reason for reason, _, _ in rollout.branches.values()} <= {"EDIT", "TRIM"}
    rollout.check()


async def test_several_messages_replaced_by_one_are_a_summary_even_among_equal_answers() -> None:
    rollout = observe("sglang", "Ok.")
    agent = rollout.agent()
    for question in ("First?", "Go on.", "Go on.", "Go on."):
        await agent.invoke_async(question)
    agent.messages[0:5] = [user("So far: nothing.")]
    await agent.invoke_async("Go on.")
    assert rollout.branches == {4: ("SUMMARY", 3, 0)}
    agent.messages[0] = user("So far: nothing at all.")
    await agent.invoke_async("Go on.")
    assert rollout.branches[5] == ("EDIT", 4, 0)
    rollout.check()


@pytest.mark.parametrize("keep", [2, 3])
async def test_summarising_is_a_side_call_and_a_summary(keep: int) -> None:
    def answer(request: Any) -> str:
        return "They counted." if len(rollout.script.requests) == 5 else f"Answer {len(rollout.script.requests)}."

    rollout = observe("sglang", answer, max_model_len=420, sampling={"max_new_tokens": 20})
    manager = SummarizingConversationManager(
        summary_ratio=0.7, preserve_recent_messages=keep, summarization_system_prompt="Sum up."
    )
    agent = rollout.agent(tools=[], conversation_manager=manager)
    for i in range(5):
        await agent.invoke_async(f"{i} " + "word " * 70)
    assert rollout.parents == [None, 0, 1, 2, None, None]
    assert rollout.branches == {4: ("SIDE_CALL", None, None), 5: ("SUMMARY", 3, 0)}
    rollout.check()


async def test_the_automatic_context_manager_offloads_and_summarises() -> None:
    answers = [call("read", f'{{"page": {i}}}') for i in range(3)]
    rollout = observe("sglang", *answers, *(f"Answer {i}." for i in range(40)), max_model_len=3400)
    rollout.model.update_config(max_new_tokens=60)
    agent = rollout.agent(tools=[read], context_manager="auto")
    await agent.invoke_async("Read it all.")
    for i in range(6):
        await agent.invoke_async(f"{i} " + "word " * 150)
    reasons = [reason for reason, _, _ in rollout.branches.values()]
    assert "SIDE_CALL" in reasons
    assert "SUMMARY" in reasons
    assert set(reasons) <= {"SIDE_CALL", "SUMMARY", "EDIT", "TRIM"}
    sides = [index for index, branch in rollout.branches.items() if branch[0] == "SIDE_CALL"]
    assert all(rollout.parents[index] is None for index in sides)
    rollout.check()
