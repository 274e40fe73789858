"""`max_total_tokens`: no trajectory is longer, answers are cut off, and nothing is sent when none are left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

from support.histories import add
from support.scripted import Says, call, model_of
from tito_core import TotalTokensReachedError
from tito_core.ledger import Finish, check_ledger

CALL = call("add", '{"a": 1, "b": 2}')


async def rollout(kind: str, bound: int | None, *answers: str) -> tuple[Any, list[BaseException]]:
    """Invoke an agent twice; return its model and the errors of its invocations."""
    model = model_of(kind, Says(*answers), max_total_tokens=bound)
    agent = Agent(model=model, tools=[add], callback_handler=None)
    ended: list[BaseException] = []
    for question in ("What is 1 + 2?", "And again?"):
        try:
            await agent.invoke_async(question)
        except MaxTokensReachedException as error:
            ended.append(error)
    check_ledger(model.ledger)
    return model, ended


def test_no_trajectory_is_longer_than_the_bound() -> None:
    free, ended = asyncio.run(rollout("sglang", None, CALL, CALL, "It is 3.", "Yes."))
    assert not ended
    whole = len(free.trajectory)

    @settings(deadline=None, max_examples=12)
    @given(st.integers(1, whole + 2))
    def holds(bound: int) -> None:
        model, ended = asyncio.run(rollout("sglang", bound, CALL, CALL, "It is 3.", "Yes."))
        assert all(len(trajectory) <= bound for trajectory in model.trajectories)
        assert bool(ended) == (bound < whole)
        for request in model.scripted.requests:
            assert len(request.prompt_ids) + request.max_new_tokens <= bound or request.ignore_eos
        for turn in model.ledger:
            if turn.path_length == bound < whole and turn.draft.finish == Finish.LENGTH:
                assert turn.draft.max_new_tokens == bound - turn.draft.prompt_length

    holds()


async def test_nothing_is_sent_when_no_token_is_left() -> None:
    model = model_of("vllm", Says("Hello."), max_total_tokens=5)
    agent = Agent(model=model, callback_handler=None)
    with pytest.raises(TotalTokensReachedError, match=r"\d+ tokens.* max_total_tokens=5 .*End the rollout"):
        await agent.invoke_async("Hello?")
    assert (len(model.ledger), len(model.scripted.requests)) == (0, 0)
