"""A forced tool choice on real engines: a sound call of the forced tool, with constrained tokens."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field
from strands import Agent

from calculator import make_agent
from support.forced_calls import force
from support.real import Served
from tito_core.ledger import check_ledger

pytestmark = pytest.mark.engine


async def test_forced_calls_with_tags_as_text(served: Served) -> None:
    outcome = await force(served.policy, 10, seed=1)
    assert outcome.found == {"right": 10}, outcome.faults


async def test_forced_calls_with_tags_as_tokens(tagged: Served) -> None:
    outcome = await force(tagged.policy, 10, seed=1)
    assert outcome.found == {"right": 10}, outcome.faults


class Sum(BaseModel):
    """The sum that was found."""

    total: int = Field(ge=0, le=1000)


async def test_an_agents_structured_output_is_a_forced_call(served: Served) -> None:
    model = served.model(temperature=0.0, max_new_tokens=96)
    agent: Agent = make_agent(model)
    result = await agent.invoke_async("What is 2 + 3?", structured_output_model=Sum, limits={"turns": 4})
    assert isinstance(result.structured_output, Sum)
    check_ledger(model.ledger)
    constrained = [turn for turn in model.ledger if turn.draft.constrained]
    assert [[(call.name, call.status) for call in turn.draft.calls] for turn in constrained] == [[("Sum", "ok")]]
