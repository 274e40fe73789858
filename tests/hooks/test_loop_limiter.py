"""Limits of an agent's loop: which calls they stop, and how the next invocation continues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent, tool
from strands.hooks import AfterModelCallEvent, AfterToolCallEvent, BeforeToolCallEvent
from strands.tools.executors import ConcurrentToolExecutor, SequentialToolExecutor
from strands.types.exceptions import MaxTokensReachedException

from support.histories import observe
from support.scripted import BACKENDS, call, ids_of
from tito_core.hooks import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxSampledTokensReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
)
from tito_core.ledger import check_ledger

ADD = call("add", '{"a": 1, "b": 2}')


def complete(agent: Agent) -> None:
    """Check that every call has its result in the next message, and every result its call."""
    messages = agent.messages
    for place, message in enumerate(messages):
        called = [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]
        after = messages[place + 1]["content"] if place + 1 < len(messages) else []
        answered = [block["toolResult"]["toolUseId"] for block in after if "toolResult" in block]
        assert sorted(called) == sorted(answered)


def results(agent: Agent) -> list[str]:
    blocks = [block for message in agent.messages for block in message["content"]]
    return [block["toolResult"]["content"][0]["text"] for block in blocks if "toolResult" in block]


@pytest.mark.parametrize(
    ("limits", "error", "allowed", "reached", "turns"),
    [
        ({"max_tool_iters": 2}, MaxToolIterationsReachedError, 2, 2, 2),
        ({"max_tool_calls": 3}, MaxToolCallsReachedError, 3, 4, 2),
        ({"max_messages": 5}, MaxMessagesReachedError, 5, 5, 2),
        ({"max_messages": 4}, MaxMessagesReachedError, 4, 5, 2),
        ({"max_messages": 1}, MaxMessagesReachedError, 1, 1, 0),
        ({"max_tool_iters": 0}, MaxToolIterationsReachedError, 0, 1, 1),
        ({"max_sampled_tokens": 0}, MaxSampledTokensReachedError, 0, 0, 0),
    ],
)
async def test_a_limit_ends_the_loop_with_its_own_error_and_the_next_invocation_continues(
    limits: dict[str, int], error: type[LoopLimitReachedError], allowed: int, reached: int, turns: int
) -> None:
    rollout = observe("vllm", ADD + ADD)
    limiter = LoopLimiter(**limits)
    agent = rollout.agent(hooks=[limiter])
    with pytest.raises(error) as caught:
        await agent.invoke_async("Add.")
    assert (caught.value.allowed, caught.value.reached) == (allowed, reached)
    assert caught.value.original_exception is caught.value
    parts = (f"{caught.value.counted} ({allowed}) reached", f"has {reached}")
    assert [part for part in parts if part not in str(caught.value)] == []
    assert len(rollout.model.ledger) == turns
    complete(agent)
    limiter.reset()
    for name in limits:
        setattr(limiter, name, None)
    rollout.script.answers = ["So."]
    assert str(await agent.invoke_async("And?")) == "So.\n"
    assert rollout.parents == [None, *range(turns)]
    rollout.check()


async def test_an_answer_at_the_limit_is_an_answer() -> None:
    rollout = observe("vllm", ADD, "So.")
    limiter = LoopLimiter(max_tool_iters=2, max_tool_calls=2, max_messages=4)
    result = await rollout.agent(hooks=[limiter]).invoke_async("Add.")
    assert result.stop_reason == "end_turn"
    assert (limiter.tool_iter_count, limiter.tool_call_count, limiter.message_count) == (1, 1, 4)
    sampled = sum(len(turn.draft.output_ids) for turn in rollout.model.ledger)
    assert limiter.sampled_token_count == sampled > 0


async def test_limits_after_tools_let_a_new_prompt_be_answered_and_others_do_not() -> None:
    rollout = observe("vllm", ADD, "So.")
    limiter = LoopLimiter(max_tool_iters=1)
    agent = rollout.agent(hooks=[limiter])
    with pytest.raises(MaxToolIterationsReachedError):
        await agent.invoke_async("Add.")
    await agent.invoke_async("And?")
    limiter.max_messages = limiter.message_count
    with pytest.raises(MaxMessagesReachedError):
        await agent.invoke_async("And then?")
    rollout.check()


async def test_sampled_tokens_count_over_turns_and_with_those_that_a_hook_discarded() -> None:
    rollout = observe("sglang", "One.", "Two.", "Three.")
    limiter = LoopLimiter(max_sampled_tokens=2 * len(ids_of("One.")) + 2)
    agent = rollout.agent(hooks=[limiter])
    once = iter([True])
    agent.hooks.add_callback(AfterModelCallEvent, lambda event: setattr(event, "retry", next(once, False)))
    await agent.invoke_async("First?")
    assert len(agent.messages) == 2
    assert limiter.sampled_token_count == sum(len(turn.draft.output_ids) for turn in rollout.model.ledger)
    with pytest.raises(MaxSampledTokensReachedError):
        await agent.invoke_async("Second?")
    limiter.max_sampled_tokens = None
    await agent.invoke_async("Second?")
    rollout.check()


@pytest.mark.parametrize(("kind", "executor"), [("vllm", ConcurrentToolExecutor), ("sglang", SequentialToolExecutor)])
async def test_the_first_parallel_calls_run_in_whatever_order_they_end(kind: str, executor: Any) -> None:
    ran = []

    @tool
    async def wait(number: int) -> str:
        """Wait the longer the earlier the call is."""
        await asyncio.sleep(0.005 * (4 - number))
        ran.append(number)
        return f"waited {number}"

    rollout = observe(kind, "".join(call("wait", f'{{"number": {n}}}') for n in range(4)), "So.", "More.")
    limiter = LoopLimiter(max_parallel_tool_calls=2)
    agent = rollout.agent(tools=[wait], hooks=[limiter], tool_executor=executor())
    await agent.invoke_async("Wait.")
    refused = results(agent)[2]
    assert results(agent) == ["waited 0", "waited 1", refused, refused]
    assert "not executed" in refused
    assert "parallel tool calls (2)" in refused
    assert sorted(ran) == [0, 1]
    assert limiter.cancelled_tool_call_count == 2
    complete(agent)
    await agent.invoke_async("And?")
    rollout.check()


async def test_a_call_that_a_hook_retries_keeps_its_position() -> None:
    rollout = observe("vllm", ADD + call("add", '{"a": 3, "b": 4}'), "So.")
    limiter = LoopLimiter(max_parallel_tool_calls=2)
    agent = rollout.agent(hooks=[limiter], tool_executor=SequentialToolExecutor())
    again = iter([True, True, True])
    agent.hooks.add_callback(AfterToolCallEvent, lambda event: setattr(event, "retry", next(again, False)))
    await agent.invoke_async("Add.")
    assert results(agent) == ["3", "7"]
    assert limiter.cancelled_tool_call_count == 0


async def test_a_direct_call_is_not_a_parallel_call() -> None:
    rollout = observe("vllm", "So.")
    agent = rollout.agent(hooks=[LoopLimiter(max_parallel_tool_calls=0)])
    assert agent.tool.add(a=1, b=2)["content"] == [{"text": "3"}]


async def test_an_interrupt_and_its_resumption_are_one_iteration() -> None:
    rollout = observe("vllm", ADD + call("add", '{"a": 3, "b": 4}') + ADD, "So.", "More.")
    limiter = LoopLimiter(max_tool_iters=1, max_parallel_tool_calls=2)
    agent = rollout.agent(hooks=[limiter])

    def ask(event: BeforeToolCallEvent) -> None:
        if event.tool_use["input"] == {"a": 3, "b": 4} and event.interrupt("sure") != "yes":
            event.cancel_tool = "refused"

    agent.hooks.add_callback(BeforeToolCallEvent, ask)
    result = await agent.invoke_async("Add.")
    assert result.stop_reason == "interrupt"
    assert limiter.tool_iter_count == 1
    answers: Any = [{"interruptResponse": {"interruptId": each.id, "response": "yes"}} for each in result.interrupts]
    with pytest.raises(MaxToolIterationsReachedError):
        await agent.invoke_async(answers)
    *ran, refused = sorted(results(agent))
    assert ran == ["3", "7"]
    assert "parallel tool calls (2)" in refused
    assert (limiter.tool_iter_count, limiter.cancelled_tool_call_count) == (1, 1)
    complete(agent)
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0]
    rollout.check()


async def test_an_agent_as_a_tool_ends_at_its_own_limit_and_its_caller_reads_why() -> None:
    rollout = observe("vllm", call("helper", '{"input": "Add."}'), ADD, "So.")
    limiter = LoopLimiter(max_tool_iters=1)
    helper = rollout.agent(name="helper", hooks=[limiter])
    agent = rollout.agent(tools=[helper.as_tool()])
    await agent.invoke_async("Let it add.")
    complete(helper)
    complete(agent)
    [result] = results(agent)
    assert "tool iterations (1) reached" in result
    rollout.check(in_order=False)


async def test_agents_that_share_a_limiter_share_its_limits() -> None:
    rollout = observe("vllm", call("helper", '{"input": "Add."}'), ADD, "So.")
    limiter = LoopLimiter(max_tool_calls=2)
    helper = rollout.agent(name="helper", hooks=[limiter])
    agent = rollout.agent(tools=[helper.as_tool()], hooks=[limiter])
    with pytest.raises(MaxToolCallsReachedError):
        await agent.invoke_async("Let it add.")
    assert limiter.tool_call_count == 2
    complete(helper)
    complete(agent)
    rollout.check(in_order=False)


async def test_counts_of_agents_on_many_threads_are_whole() -> None:
    limiter = LoopLimiter()
    agents = [observe("vllm", ADD + ADD, "So.").agent(hooks=[limiter]) for _ in range(8)]
    await asyncio.gather(*(asyncio.to_thread(agent, "Add.") for agent in agents))
    assert (limiter.tool_iter_count, limiter.tool_call_count, limiter.message_count) == (8, 16, 32)


LIMITS = ("max_tool_iters", "max_tool_calls", "max_parallel_tool_calls", "max_messages", "max_sampled_tokens")
ANSWERS = (
    "So.",
    ADD,
    ADD + ADD,
    ADD + call("nope", "{}") + ADD,
    call("add", '{"a": 1,}') + ADD,
    "Hmm. " + 5 * ADD + "...",
)
CUT = 100
"""Maximum tokens of an answer; the last of `ANSWERS` is longer."""


@settings(max_examples=8)
@given(
    kind=st.sampled_from(BACKENDS),
    answers=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=4),
    limits=st.dictionaries(st.sampled_from(LIMITS), st.integers(0, 6), min_size=1, max_size=3),
    tokens=st.integers(0, 80),
    prompts=st.integers(1, 3),
)
async def test_at_any_limit_the_history_is_complete_and_continues(
    kind: str, answers: list[str], limits: dict[str, int], tokens: int, prompts: int
) -> None:
    rollout = observe(kind, *answers, "So.", sampling={"max_new_tokens": CUT})
    if "max_sampled_tokens" in limits:
        limits = {**limits, "max_sampled_tokens": tokens}
    limiter = LoopLimiter(**limits)
    agent = rollout.agent(hooks=[limiter])
    for number in range(prompts):
        await invoked(agent, f"{number}?")
        complete(agent)
        for name, counted in zip(LIMITS[:2], (limiter.tool_iter_count, limiter.tool_call_count), strict=True):
            if name in limits:
                assert counted <= limits[name] + 3 * (number + 1)  # each invocation may end with one more answer
    for name in LIMITS:
        setattr(limiter, name, None)
    rollout.script.answers = ["So."]
    assert str(await agent.invoke_async("And?")) == "So.\n"
    complete(agent)
    answered = [message for message in agent.messages if message["role"] == "assistant"]
    assert limiter.message_count == len(agent.messages)
    assert limiter.sampled_token_count == sum(len(turn.draft.output_ids) for turn in rollout.model.ledger)
    called = [sum("toolUse" in block for block in one["content"]) for one in answered]  # malformed calls too
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (len(list(filter(None, called))), sum(called))
    check_ledger(rollout.model.ledger)
    if all(answer in ANSWERS[:4] for answer in answers):  # the engine reads the others differently than Strands
        rollout.check()


async def invoked(agent: Agent, prompt: str) -> None:
    try:
        await agent.invoke_async(prompt)
    except (LoopLimitReachedError, MaxTokensReachedException):
        return
