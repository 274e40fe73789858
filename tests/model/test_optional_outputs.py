"""Optional outputs are columns of the trajectory, on each backend and from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strands import Agent, tool

from support.scripted import BACKENDS, Says, backend_of, call, engine_of, tokenizer
from tito_conformance.testing.script import PositionScorer, routed
from tito_core import Policy, TITOModel
from tito_core.backend import UnsupportedByServerError
from tito_core.ledger import Provenance, check_ledger
from tito_core.store import LedgerFile

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
async def test_a_file_gives_the_columns_back(kind: str, tmp_path: Path) -> None:
    policy, _ = policy_on(kind, "Yes.")
    path = tmp_path / "rollouts.tito"
    with LedgerFile(path, "a") as file:
        model = policy.model(optional_outputs=WANTED, ledger=file.attach(policy.ledger()))
        await Agent(model=model, callback_handler=None).invoke_async("Is it?")
    with LedgerFile(path) as read:
        (again,) = list(read)
    assert len(again) == 1
    extras = model.ledger[0].draft.extras
    assert {name: (c.start, c.shape, c.buffer) for name, c in again[0].draft.extras.items()} == {
        name: (c.start, c.shape, c.buffer) for name, c in extras.items()
    }
    check_ledger(again)


async def test_columns_are_equal_on_both_backends() -> None:
    columns = []
    for kind in BACKENDS:
        model, _ = await rollout(kind)
        columns.append([{n: (c.start, c.buffer) for n, c in turn.draft.extras.items()} for turn in model.ledger])
    assert columns[0] == columns[1]


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


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_rollout_without_optional_outputs_has_no_columns(kind: str) -> None:
    policy, engine = policy_on(kind, "Yes.")
    model = policy.model()
    await Agent(model=model, callback_handler=None).invoke_async("Is it?")
    assert model.trajectory.column_names == ()
    body = engine.requests[-1].body
    assert not {"return_routed_experts", "prompt_logprobs", "priority"} & {*body, *body.get("sampling_params", {})}
    with pytest.raises(KeyError, match="No turn has a column 'top_ids'"):
        model.trajectory.column("top_ids", -1)


@pytest.mark.parametrize("kind", BACKENDS)
def test_an_unsupported_output_is_refused_before_anything_is_sent(kind: str) -> None:
    engine = engine_of(kind, Says("Yes."))
    policy = Policy.connect(backend=backend_of(engine, kind), tokenizer=tokenizer())
    before = len(engine.requests)
    with pytest.raises(UnsupportedByServerError, match="--enable-return-routed-experts"):
        policy.model(optional_outputs=WANTED)
    with pytest.raises(UnsupportedByServerError, match="--enable-return-routed-experts"):
        TITOModel(backend=backend_of(engine, kind), tokenizer=tokenizer(), optional_outputs=WANTED)
    assert all(request.measures or request.max_new_tokens < 2 for request in engine.requests[before:])
