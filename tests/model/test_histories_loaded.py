"""Histories on a ledger that was loaded from a file, which holds only digests of messages."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from support.conversations import answer, user
from support.scripted import Says, model_of
from tito_core.ledger import Branch, Reason
from tito_core.store import from_record, to_record
from tito_core.turn.branch import HistoryChangedError


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
