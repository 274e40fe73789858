"""Changes of one agent's history by a user or a hook: an exact continuation, or a branch with reason and place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from strands.hooks import AfterModelCallEvent

from support.histories import observe
from support.scripted import BACKENDS, END, ids_of

pytestmark = pytest.mark.parametrize("kind", BACKENDS)


def user(text: str) -> Any:
    return {"role": "user", "content": [{"text": text}]}


async def ask(agent: Any, *questions: str) -> None:
    for question in questions:
        await agent.invoke_async(question)


async def test_an_edited_message_leaves_after_the_turn_before_it(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.", "Four.")
    agent = rollout.agent()
    await ask(agent, "First?", "Second?")
    agent.messages[2] = user("Second, redacted?")
    await ask(agent, "Third?", "Fourth?")
    assert rollout.parents == [None, 0, None, 2]
    assert rollout.branches == {2: ("EDIT", 0, 2)}
    rollout.check()


async def test_a_message_redacted_in_place_is_an_edit(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.")
    agent = rollout.agent()
    await ask(agent, "My number is 12345.")
    agent.messages[0]["content"][0]["text"] = "My number is [redacted]."
    await ask(agent, "And?")
    assert rollout.parents == [None, None]
    assert rollout.branches == {1: ("EDIT", 0, 0)}
    rollout.check()


async def test_an_edited_answer_is_an_edit_of_that_answer(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.")
    agent = rollout.agent()
    await ask(agent, "First?", "Second?")
    agent.messages[3]["content"] = [{"text": "Two, corrected."}]
    await ask(agent, "Third?")
    assert rollout.branches == {2: ("EDIT", 0, 3)}
    rollout.check()


async def test_a_second_edit_is_linked_past_the_root_of_the_first(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.", "Four.")
    agent = rollout.agent()
    await ask(agent, "First?", "Second?")
    agent.messages[2] = user("Second, edited?")
    await ask(agent, "Third?")
    agent.messages[4] = user("Third, edited?")
    await ask(agent, "Fourth?")
    assert rollout.branches == {2: ("EDIT", 0, 2), 3: ("EDIT", 0, 4)}
    rollout.check()


@pytest.mark.parametrize("again", ["Second?", "Another?"])
async def test_a_popped_user_message_is_a_rewind(kind: str, again: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.")
    agent = rollout.agent()
    await ask(agent, "First?", "Second?")
    del agent.messages[2:]
    await ask(agent, again)
    assert rollout.parents == [None, 0, 0]
    assert rollout.branches == {2: ("RETRY", 0, 3) if again == "Second?" else ("REWIND", 0, 2)}
    rollout.check()


async def test_a_rewind_to_a_leaf_is_not_a_branch(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.", "Four.")
    agent = rollout.agent()
    await ask(agent, "First?", "Second?")
    older = copy.deepcopy(agent.messages)
    del agent.messages[2:]
    await ask(agent, "Other?")
    agent.messages[:] = older
    await ask(agent, "Third?")
    assert rollout.parents == [None, 0, 0, 1]
    assert rollout.branches == {2: ("REWIND", 0, 2)}
    rollout.check()


async def test_an_emptied_history_starts_a_new_root(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.")
    agent = rollout.agent()
    await ask(agent, "First?")
    agent.messages.clear()
    await ask(agent, "Something else?")
    agent.messages.clear()
    await ask(agent, "First?")
    assert rollout.parents == [None, None, None]
    assert rollout.branches == {1: ("REWIND", 0, 0), 2: ("RETRY", 1, 0)}
    rollout.check()


async def test_a_removed_round_is_a_trim(kind: str) -> None:
    rollout = observe(kind, "One.", "Two.", "Three.", "Four.")
    agent = rollout.agent()
    await ask(agent, "First?", "Second?", "Third?")
    del agent.messages[2:4]
    await ask(agent, "Fourth?")
    assert rollout.branches == {3: ("TRIM", 0, 2)}
    rollout.check()


async def test_several_messages_replaced_by_one_are_a_summary_even_among_equal_answers(kind: str) -> None:
    rollout = observe(kind, "Ok.")
    agent = rollout.agent()
    await ask(agent, "First?", "Go on.", "Go on.", "Go on.")
    agent.messages[0:5] = [user("So far: nothing.")]
    await ask(agent, "Go on.")
    assert rollout.branches == {4: ("SUMMARY", 3, 0)}
    agent.messages[0] = user("So far: nothing at all.")
    await ask(agent, "Go on.")
    assert rollout.branches[5] == ("EDIT", 4, 0)
    rollout.check()


@pytest.mark.parametrize("texts", [("One.", "Another."), ("One.", "One.")])
async def test_a_retried_answer_is_a_retry_and_the_kept_one_is_continued(kind: str, texts: tuple[str, str]) -> None:
    # Two answers, different ids even where the text is the same.
    first, second = ids_of(texts[0] + END), [*(i for c in texts[1] for i in ids_of(c)), *ids_of(END)]
    rollout = observe(kind, "Zero.", first, second, "Two.")
    agent = rollout.agent()
    await ask(agent, "Nought?")
    again = [True]

    def retry(event: AfterModelCallEvent) -> None:
        event.retry = again.pop() if again else False

    agent.hooks.add_callback(AfterModelCallEvent, retry)
    await ask(agent, "First?", "Second?")
    assert rollout.parents == [None, 0, 0, 2]
    assert rollout.branches == {2: ("RETRY", 0, 3)}
    assert rollout.model.trajectories[1].token_ids.tolist() == list(rollout.script.requests[3].prompt_ids) + ids_of(
        "Two." + END
    )
    rollout.check()


async def test_a_retried_first_answer_is_a_root_with_the_reason(kind: str) -> None:
    rollout = observe(kind, "One.", "Uno.", "Two.")
    agent = rollout.agent()
    again = [True]
    agent.hooks.add_callback(AfterModelCallEvent, lambda event: setattr(event, "retry", bool(again and again.pop())))
    await ask(agent, "First?", "Second?")
    assert rollout.parents == [None, None, 1]
    assert rollout.branches == {1: ("RETRY", 0, 1)}
    rollout.check()


@pytest.mark.parametrize("before", [0, 1])
async def test_an_answer_lost_to_a_hook_that_raises_stays_a_leaf(kind: str, before: int) -> None:
    rollout = observe(kind, *["Zero."][:before], "Lost.", "Kept.", "More.")
    agent = rollout.agent()
    await ask(agent, *["Nought?"][:before])
    fail = [True]

    def refuse(event: AfterModelCallEvent) -> None:
        if fail:
            fail.pop()
            raise RuntimeError("guardrail")

    agent.hooks.add_callback(AfterModelCallEvent, refuse)
    with pytest.raises(RuntimeError, match="guardrail"):
        await ask(agent, "First?")
    assert agent.messages[-1]["role"] == "user"
    await ask(agent, "Second?", "Third?")
    if before:
        assert rollout.parents == [None, 0, 0, 2]
        assert rollout.branches == {2: ("REWIND", 0, 3)}
    else:
        assert rollout.parents == [None, None, 1]
        assert rollout.branches == {1: ("REWIND", 0, 1)}
    rollout.check()
