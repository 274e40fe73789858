"""Copies and pickles: ledgers can be sent; models and policies refuse, with what to send instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from strands import Agent

from support.names import named
from support.scripted import BACKENDS, Says, model_of, policy_of
from tito_core import store
from tito_core.ledger import check_ledger

by_kind = pytest.mark.parametrize("kind", BACKENDS)
COPIES: list[Callable[[Any], Any]] = [pickle.dumps, copy.deepcopy, copy.copy]


async def test_a_rollouts_ledger_is_copied_and_continued_by_another_model() -> None:
    model = model_of("vllm", Says("Five.", "Yes."))
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async("2 + 3?")
    whole = store.encode(model.ledger)
    for ledger in (pickle.loads(pickle.dumps(model.ledger)), copy.deepcopy(model.ledger)):
        assert store.encode(ledger) == whole
        other = model.policy.model(ledger=ledger)
        await Agent(model=other, callback_handler=None, messages=copy.deepcopy(agent.messages)).invoke_async("Sure?")
        assert [turn.parent for turn in ledger] == [None, 0]
        check_ledger(ledger)
    assert store.encode(model.ledger) == whole


@pytest.mark.parametrize("copying", COPIES)
def test_a_policys_error_names_what_to_send(copying: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"Policy\.connect"):
        copying(policy_of("sglang"))


@pytest.mark.parametrize("copying", COPIES)
@pytest.mark.parametrize("make", [model_of, named])
def test_a_models_error_names_what_to_send(copying: Callable[[Any], Any], make: Callable[[str, Says], Any]) -> None:
    with pytest.raises(TypeError, match=r"model\.ledger"):
        copying(make("vllm", Says("Five.")))
