"""Optional outputs are columns of the trajectory, on each backend and from a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from strands import Agent, tool

from support.scripted import BACKENDS, Says, backend_of, call, engine_of, tokenizer
from tito_conformance.testing.script import PositionScorer, routed
from tito_core import Policy, TITOModel
from tito_core.ledger import Provenance, check_ledger

SHAPE = (2, 3)
WANTED: dict[str, Any] = {"top_logprobs": 4, "prompt_logprobs": True, "routed_experts": SHAPE}


@tool
def look(at: str = "") -> str:
    """Look.

    Args:
        at: Where.
    """
    return f"There is {at}."


def policy_on(kind: str, *answers: Any, **options: Any) -> tuple[Policy, Any]:
    engine = engine_of(kind, Says(*answers), experts=SHAPE, **options)
    return Policy.connect(backend=backend_of(engine, kind), tokenizer=tokenizer()), engine


async def rollout(kind: str, **options: Any) -> tuple[TITOModel, Any]:
    policy, engine = policy_on(kind, call("look", '{"at": "sea"}'), "A sea.", "Blue.", **options)
    model = policy.model(optional_outputs=WANTED)
    agent = Agent(model=model, tools=[look], callback_handler=None)
    for question in ("What is there?", "What colour?"):
        await agent.invoke_async(question)
    check_ledger(model.ledger)
    return model, engine


@pytest.mark.parametrize("kind", BACKENDS)
async def test_each_token_of_a_trajectory_has_its_row_once(kind: str) -> None:
    model, _ = await rollout(kind)
    trajectory = model.trajectory
    ids, n = trajectory.token_ids.tolist(), len(trajectory)
    assert len(trajectory.path) == 3
    assert set(trajectory.column_names) == {"top_ids", "top_logprobs", "prompt_logprobs", "routed_experts"}

    scores = np.array([np.nan, *PositionScorer().score(ids, 1, 1.0)], np.float32)
    outputs = trajectory.provenance >= Provenance.SAMPLED
    prompt = trajectory.column("prompt_logprobs", np.nan)
    np.testing.assert_array_equal(prompt, np.where(outputs, np.float32(np.nan), scores))
    np.testing.assert_array_equal(trajectory.logprobs, np.where(outputs, scores, np.float32(np.nan)))

    experts = trajectory.column("routed_experts", 255)
    assert experts.shape == (n, *SHAPE)
    assert experts[:-1].tolist() == routed(ids, *SHAPE).tolist(), "none is missing where one turn follows another"
    assert (experts[-1] == 255).all()

    top = trajectory.column("top_logprobs", np.nan)
    assert (np.isfinite(top).all(1) == outputs).all()
    rows = sum(turn.draft.extras["routed_experts"].rows for turn in trajectory.path)
    assert rows == n - 1, "and each was sent once"


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_branch_has_the_rows_of_its_own_delta(kind: str) -> None:
    policy, _ = policy_on(kind, "One.", "Two.", "Three.")
    model = policy.model(optional_outputs=WANTED)
    first: Any = [{"role": "user", "content": [{"text": "Go."}]}]
    answered: Any = [*first, {"role": "assistant", "content": [{"text": "One."}]}]
    for history in (first, [*answered, *first], [*answered, {"role": "user", "content": [{"text": "No, you."}]}]):
        async for _ in model.stream(history):
            pass
    check_ledger(model.ledger)
    assert [turn.parent for turn in model.ledger] == [None, 0, 0]
    for trajectory in model.trajectories:
        experts = trajectory.column("routed_experts", 255)
        assert experts[:-1].tolist() == routed(trajectory.token_ids.tolist(), *SHAPE).tolist()
