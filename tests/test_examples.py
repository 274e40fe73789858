"""What the examples' rollouts say of their ends is what exporters read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import math_agent
from strands_tito.export import samples_of
from support.scripted import BACKENDS, Says, backend_of, call, engine_of, policy_of
from tito_core import Policy
from tito_core.termination import Termination
from training.task import Problem, attempt

CALL = call("calculator", '{"expression": "25 * 17"}')
by_kind = pytest.mark.parametrize("kind", BACKENDS)


def scripted(kind: str, *answers: Any) -> Policy:
    return replace(policy_of(kind), backend=backend_of(engine_of(kind, Says(*answers)), kind))


ENDS = [
    ((CALL, "It is 425."), Termination.COMPLETED),
    ((CALL,), Termination.LIMIT),
    (("on and " * 80 + "...",), Termination.TRUNCATED),
]


@by_kind
@pytest.mark.parametrize(("answers", "ended"), ENDS)
async def test_the_math_agents_rollouts_are_exported(kind: str, answers: tuple[str, ...], ended: Termination) -> None:
    ledger = await math_agent.run_rollout(scripted(kind, *answers), "What is 25 * 17?", "425")
    (sample,) = samples_of(ledger)
    assert sample.termination is ended
    assert sample.reward == float(ended is Termination.COMPLETED)


@by_kind
@pytest.mark.parametrize(("answers", "ended"), ENDS)
async def test_the_training_tasks_rollouts_are_exported(
    kind: str, answers: tuple[str, ...], ended: Termination
) -> None:
    ledger = await attempt(scripted(kind, *answers), Problem("What is 25 * 17?", 425), "a")
    (sample,) = samples_of(ledger)
    assert sample.termination is ended
