"""Exporters read the terminations and rewards that the examples record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import math_agent
import sub_agent
from strands_tito.export import samples_of
from support.scripted import Says, backend_of, call, engine_of, policy_of
from tito_core import Policy
from tito_core.termination import Termination
from training.task import Problem, attempt

CALL = call("calculator", '{"expression": "25 * 17"}')


def scripted(kind: str, *answers: Any) -> Policy:
    return replace(policy_of(kind), backend=backend_of(engine_of(kind, Says(*answers)), kind))


ENDS = [
    ("vllm", (CALL, "It is 425."), Termination.COMPLETED),
    ("sglang", (CALL,), Termination.LIMIT),
    ("vllm", ("on and " * 80 + "...",), Termination.TRUNCATED),
]


@pytest.mark.parametrize(("kind", "answers", "ended"), ENDS)
async def test_the_math_agents_rollouts_are_exported(kind: str, answers: tuple[str, ...], ended: Termination) -> None:
    ledger = await math_agent.run_rollout(scripted(kind, *answers), "What is 25 * 17?", "425")
    (sample,) = samples_of(ledger)
    assert sample.termination is ended
    assert sample.reward == float(ended is Termination.COMPLETED)


@pytest.mark.parametrize(("kind", "answers", "ended"), ENDS)
async def test_the_training_tasks_rollouts_are_exported(
    kind: str, answers: tuple[str, ...], ended: Termination
) -> None:
    ledger = await attempt(scripted(kind, *answers), Problem("What is 25 * 17?", 425), "a")
    (sample,) = samples_of(ledger)
    assert sample.termination is ended


async def test_both_agents_of_a_pair_are_trained_each_with_its_own_reward() -> None:
    """The boss calls the worker, which calls the calculator and answers right; the boss repeats it wrong."""
    ledger = await sub_agent.run_rollout(scripted("vllm", CALL, CALL, "It is 425.", "It is 426."), "What is 25 * 17?")
    worker, boss = samples_of(ledger)
    assert [(one.identity.agent, one.total, one.turns) for one in (worker, boss)] == [
        ("worker", 1.0, 2),
        ("boss", 0.0, 2),
    ]
    assert worker.loss_mask.sum() + boss.loss_mask.sum() == sum(len(turn.draft.output_ids) for turn in ledger)
