"""A model that connects at its first turn, and is otherwise a `TITOModel`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent

from support.names import named
from support.scripted import BACKENDS, Says, model_of
from tito_compat.model import SharedPolicies
from tito_core import store
from tito_core.ledger import check_ledger

by_kind = pytest.mark.parametrize("kind", BACKENDS)


@by_kind
async def test_a_model_connects_at_the_first_turn_and_not_at_reset(kind: str) -> None:
    model = named(kind, Says("Five."))
    assert (len(model.rollout), model.rollouts, model.tool_parse_errors, len(model.reset())) == (0, [], {}, 0)
    assert model.rollout_history == []
    assert not model.is_connected
    with pytest.raises(AttributeError, match="has no attribute 'polcy'"):
        _ = model.polcy
    assert not model.is_connected
    await Agent(model=model, callback_handler=None).invoke_async("2 + 3?")
    assert model.is_connected


@by_kind
async def test_reading_an_attribute_of_a_connected_model_connects(kind: str) -> None:
    messages: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]
    counted = await named(kind, Says("Five.")).count_tokens(messages)
    for read in (lambda m: m.certificate.passed, lambda m: m.ledger.uuid, lambda m: m.policy.info):
        model = named(kind, Says("Five."))
        assert read(model)
        assert model.is_connected
    assert counted == await model_of(kind, Says("Five.")).count_tokens(messages)


@by_kind
async def test_its_turns_are_those_of_a_tito_model(kind: str) -> None:
    answers = ("Five.", "Yes.")
    lazy, plain = named(kind, Says(*answers)), model_of(kind, Says(*answers))
    for model in (lazy, plain):
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("2 + 3?")
        await agent.invoke_async("Sure?")
        check_ledger(model.ledger)
    columns = [[turn.draft.columns.buffer for turn in model.ledger] for model in (lazy, plain)]
    assert columns[0] == columns[1]
    assert len(store.encode(lazy.ledger)) > 0


@by_kind
async def test_a_cancelled_agent_leaves_no_turn(kind: str) -> None:
    script = Says("Five.")
    seconds = [0.0]
    model = named(kind, script, engine={"latency": lambda _: seconds[0]})
    held = model.rollout
    await model.connected()
    seconds[0] = 30.0
    agent = Agent(model=model, callback_handler=None)
    task = asyncio.ensure_future(agent.invoke_async("2 + 3?"))
    while not script.requests:
        await asyncio.sleep(0.01)
    agent.cancel()
    async with asyncio.timeout(20):
        assert (await task).stop_reason == "cancelled"
    assert (len(model.ledger), len(held)) == (0, 0)


@by_kind
async def test_structured_output_alone_leaves_the_rollout_empty(kind: str) -> None:
    class Sum(BaseModel):
        total: int

    model = named(kind, Says('{"total": 5}'))
    prompt: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]
    events = [event async for event in model.structured_output(Sum, prompt)]
    assert events == [{"output": Sum(total=5)}], "the one event, as with the other providers"
    assert len(model.rollout) == 0
    assert [sum(rollout.loss_mask) for rollout in model.rollouts] == [0], "sampled under a grammar"


async def test_a_failed_connection_is_not_cached() -> None:
    shared, failures = SharedPolicies(), []

    def fail() -> Any:
        failures.append(1)
        raise RuntimeError("no server")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no server"):
            shared.get("key", fail)
    made: Any = object()
    assert shared.get("key", lambda: made) is made
    assert shared.get("key", fail) is made
    assert len(failures) == 2
