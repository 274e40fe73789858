"""Histories that change, begin elsewhere or are shared: each is exact, a linked branch, or refused."""

from __future__ import annotations

import asyncio
import copy
import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager, SummarizingConversationManager
from strands.hooks import AfterToolsEvent

from support.conversations import answer, calls, results, user
from support.histories import ObservedRollout, add, observe
from support.scripted import Says, backend_of, call, engine_of, ids_of, model_of, structured, tokenizer
from tito_conformance.testing import Completion, ScriptedRequest
from tito_core import Policy
from tito_core.ledger import Branch, Reason
from tito_core.model import SeveralTrajectoriesError
from tito_core.store import from_record, to_record
from tito_core.termination import Termination, termination_of
from tito_core.turn.branch import HistoryChangedError
from tito_core.turn.request import TrimmedHistoryError, _missing


async def two_turns(**options: Any) -> tuple[ObservedRollout, Any]:
    rollout = observe("sglang", "One.", "Two.", "Three.", history="error", **options)
    agent = rollout.agent()
    await agent.invoke_async("First?")
    await agent.invoke_async("Second?")
    return rollout, agent


NOTHING = 'user("So far: nothing.")'
LONG = 'agent.messages[2] = user("Second, redacted?" + "x" * 44)'
SECOND, FIRST = r"message 2 \(user\) changed .*'Second\?'", r"message 0 \(user\) changed .*'First\?'"
ADDED = r"message 5 \(assistant\) was not sampled here: '[^']*add[^']*'"
CHANGES = {
    LONG: (rf"{SECOND}.*'Second, redacted\?x{{43}}\.\.\.'", "(edit, from turn 0, at message 2)"),
    'agent.messages[0] = user("[gone]", "all")': (rf"{FIRST}.*'\[gone\] all'", "(edit, from turn 1, at message 0)"),
    'agent.messages[1] = answer("Eins.")': (r"\(assistant\) .*'One\.'.*'Eins\.'", "(edit, from turn 1, at message 1)"),
    "del agent.messages[2:]": (rf"{SECOND}.*'Third\?'", "(rewind, from turn 0, at message 2)"),
    "del agent.messages[:]": (rf"{FIRST}.*'Third\?'", "(rewind, from turn 1, at message 0)"),
    "del agent.messages[:2]": (rf"{FIRST}.*'Second\?'", "(trim, from turn 1, at message 0)"),
    f"agent.messages[:3] = [{NOTHING}]": (rf"{FIRST}.*'So far: nothing\.'", "(summary, from turn 1, at message 0)"),
    f"agent.messages[:2] = [{NOTHING}]": (FIRST, "(summary, from turn 1, at message 0)"),
    "agent.messages[:] = agent.messages[2:3]": (rf"{FIRST}.*'Second\?'", "(trim, from turn 1, at message 0)"),
    "agent.messages[2:2] = agent.messages[:2]": (rf"{SECOND}.*'First\?'", "(edit, from turn 0, at message 2)"),
    "agent.tool.add(a=1, b=2)": (ADDED, "(edit, from turn 1, at message 4)"),
    'agent.system_prompt = "Be long."': (
        "the system prompt",
        "(new system prompt or tools (system prompt), from turn 1)",
    ),
    "agent.tool_registry.registry.clear()": ("the tools changed", ""),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_each_change_raises_before_anything_is_sent(change: str) -> None:
    rollout, agent = await two_turns()
    exec(change, {"agent": agent, "user": user, "answer": answer})
    what, why = CHANGES[change]
    with pytest.raises(HistoryChangedError, match=f"{what}.*{re.escape(why)}"):
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


# Histories on a ledger that was loaded from a file, which holds only digests of messages.


async def turn(model: Any, messages: list[Any], state: dict[str, Any] | None, text: str | None) -> Any:
    """Play one turn, perhaps with a new user message; append the answer as Strands would and return the turn."""
    if text is not None:
        messages.append(user(text))
    text = ""
    async for event in model.stream(copy.deepcopy(messages), model_state=state):
        text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
    messages.append(answer(text))
    return model.ledger[len(model.ledger) - 1]


async def loaded() -> tuple[Any, list[Any], dict[str, Any]]:
    """Return a model on a loaded ledger of two turns, and the agent's history and state."""
    model = model_of("vllm", Says("One.", "Two."))
    messages: list[Any] = []
    state: dict[str, Any] = {}
    for text in ("A?", "B?"):
        await turn(model, messages, state, text)
    again = from_record(to_record(model.ledger))
    return model_of("vllm", Says("Three.", "Four."), ledger=again), messages, state


async def test_a_changed_first_message_is_an_edit_of_the_agents_history() -> None:
    model, messages, state = await loaded()
    messages[0] = user("A, otherwise?")
    with pytest.raises(HistoryChangedError, match="the history changed"):
        await turn(model.policy.model(ledger=model.ledger, history="error"), [*messages], dict(state), "C?")
    made = await turn(model, messages, state, "C?")
    assert (made.parent, made.draft.branch) == (None, Branch(Reason.EDIT, 1))


async def test_a_user_message_after_an_earlier_turn_is_a_rewind_and_its_repetition_a_retry() -> None:
    """The loaded ledger has only the digest up to the answer, not the user message."""
    model, messages, state = await loaded()
    known = dict(state)
    made = await turn(model, messages[:3], state, None)
    assert (made.parent, made.draft.branch) == (0, Branch(Reason.REWIND, 0))
    again = await turn(model, messages[:3], known, None)
    assert (again.parent, again.draft.branch) == (0, Branch(Reason.RETRY, 0))


async def test_an_agent_without_a_key_is_separate() -> None:
    model, messages, _ = await loaded()
    made = await turn(model, messages[:2], {}, "C, rather?")
    assert (made.parent, made.draft.branch) == (0, Branch(Reason.SEPARATE, 0))
    aside = await turn(model, [*messages[:2]], None, "D?")
    assert (aside.parent, aside.draft.branch) == (0, Branch(Reason.SIDE_CALL, 0))


# Histories that start with messages that were not sampled here are exact.


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


# Several agents and side calls on one model: each has its own path, with the right branch reason.


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
    with pytest.raises(LookupError, match="no turn yet"):
        _ = rollout.model.trajectory
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


# Tools, interrupts, limits and structured output: the history after a call is continued.


@tool
def give(what: str) -> Any:
    """Give something back.

    Args:
        what: What.
    """
    given: dict[str, Any] = {
        "nothing": {"status": "success", "content": []},
        "blank": {"status": "success", "content": [{"text": ""}]},
        "json": {"status": "success", "content": [{"json": {"a": [1, 1.5, None, True], "é": "<&>"}}]},
        "both": {"status": "success", "content": [{"text": "one"}, {"json": [2]}, {"text": "three"}]},
        "error": {"status": "error", "content": [{"text": "it broke"}]},
    }
    if what == "raise":
        raise ValueError("it raised")
    return given[what]


@pytest.mark.parametrize("what", ["nothing", "blank", "json", "both", "error", "raise"])
async def test_every_kind_of_result_is_continued(what: str) -> None:
    rollout = observe("sglang", call("give", f'{{"what": "{what}"}}'), "So.", "More.")
    agent = rollout.agent(tools=[give])
    await agent.invoke_async("Give.")
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    assert rollout.branches == {}
    rollout.check()


async def test_parallel_results_read_in_the_order_of_their_calls_whatever_order_they_come_in() -> None:
    answers = [
        call("give", '{"what": "both"}'),
        call("add.x", "{}"),
        call("add", '{"a": 1, "b": 2}'),
        call("nope", "{}"),
    ]
    rollout = observe("sglang", "".join(answers), "So.", "More.")
    agent = rollout.agent(tools=[give, *rollout.agent().tool_registry.registry.values()])
    await agent.invoke_async("Do it all.")
    uses = [block["toolUse"]["toolUseId"] for block in agent.messages[1]["content"]]
    result_ids = [block["toolResult"]["toolUseId"] for block in agent.messages[2]["content"]]
    assert sorted(result_ids) == sorted(uses)
    assert result_ids[0] == uses[1], "the invalid name's error comes first"
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    rollout.check()


async def test_results_that_a_hook_reverses_are_rendered_in_the_order_of_the_calls() -> None:
    rollout = observe("sglang", call("add", '{"a": 1, "b": 2}') + call("add", '{"a": 3, "b": 4}'), "So.", "More.")
    agent = rollout.agent()
    agent.hooks.add_callback(AfterToolsEvent, lambda event: event.message["content"].reverse())
    await agent.invoke_async("Add.")
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    assert rollout.shown[1].messages[2]["content"][0]["toolResult"]["content"] == [{"text": "7"}]
    rollout.check()


STOP = " STOP"


class StopsAtString(Says):
    """A script that ends an answer at a stop string, as an engine does."""

    def __call__(self, request: ScriptedRequest) -> Completion:
        done = super().__call__(request)
        at_stop = list(done.output_ids[-len(ids_of(STOP)) :]) == ids_of(STOP)
        return replace(done, finish="stop", stop=STOP) if at_stop else done


async def test_a_stop_string_after_a_call_still_runs_the_call() -> None:
    first = ids_of(call("add", '{"a": 1, "b": 2}') + STOP)
    rollout = observe("sglang", lambda request: first, "So.", "More.", says=StopsAtString, sampling={"stop": [STOP]})
    agent = rollout.agent()
    result = await agent.invoke_async("Add.")
    assert result.stop_reason == "end_turn"
    assert rollout.model.ledger[0].draft.stop == STOP
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    rollout.check()


class Sum(BaseModel):
    """A sum."""

    total: int


async def test_structured_output_switched_on_and_off_again_opens_anew_each_time() -> None:
    rollout = observe("sglang", "One.", "It is five.", structured("Sum", '{"total": 5}'), "Four.", "Five.")
    agent = rollout.agent()
    await agent.invoke_async("First?")
    result = await agent.invoke_async("2 + 3?", structured_output_model=Sum)
    assert result.structured_output == Sum(total=5)
    await agent.invoke_async("Third?")
    await agent.invoke_async("Fourth?")
    # Strands adds a tool named after the class while it is on.
    assert rollout.parents == [None, None, 1, None, 3]
    assert rollout.branches == {1: ("OPENING", 0, None), 3: ("OPENING", 2, None)}
    assert [turn.draft.constrained for turn in rollout.model.ledger] == [False, False, True, False, False]
    rollout.check()


# Strands' conversation managers and retries: each turn is exact or a linked branch.


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
    made = copy.copy(tokenizer())
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
