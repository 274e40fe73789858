"""Every example on every real engine, one server each."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

import drift
import math_agent
import partial_rollouts
import structured_output
import sub_agent
import tito_engines as engines
from support.keeping import ONCE
from support.real import policy_at
from tito_core import Policy
from tito_core.ledger import Provenance
from tito_engines import install, models
from train_tiny import DISTIL, LORA, Settings, Training, prepare
from training import curves
from training.process import ENVIRONMENT, LearnerProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tests" / "support" / "learner_check.py"


@dataclass(frozen=True)
class Here:
    url: str
    policy: Policy
    python: Path
    weights: Path


@pytest.fixture(scope="module", params=ONCE)
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    python = install.ensure(engines.find(request.param)).python
    with engines.running_sync(request.param, dev_mode=True) as url:
        policy = asyncio.run(policy_at(request.param, url))
        yield Here(url, policy, python, models.ensure("smollm2", python))


async def test_the_math_agent_gives_groups_with_rewards(here: Here) -> None:
    ledgers = await math_agent.main(here.policy)
    assert len(ledgers) == len(math_agent.PROBLEMS) * math_agent.COPIES
    assert {ledger.header.group_id for ledger in ledgers} == set(math_agent.PROBLEMS)
    assert {ledger.annotation("reward") for ledger in ledgers} <= {0.0, 1.0}


async def test_structured_output_is_constrained_and_left_out_of_the_mask(here: Here) -> None:
    ledger = await structured_output.main(here.policy)
    forced = [turn for turn in ledger if turn.draft.constrained]
    assert [call.status for turn in forced for call in turn.draft.calls] == ["ok"]
    trajectories = ledger.trajectories()
    assert sum(trajectory.count(Provenance.CONSTRAINED) for trajectory in trajectories) > 10


def test_an_example_runs_from_its_command_line(here: Here) -> None:
    kind = here.policy.info.backend
    command = [sys.executable, ROOT / "examples" / "structured_output.py", "--backend", kind, "--base-url", here.url]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("Sum(total=")


async def test_a_sub_agent_is_a_root_of_its_own(here: Here) -> None:
    ledgers = await sub_agent.main(here.policy)
    roots = [sum(turn.parent is None for turn in ledger) for ledger in ledgers]
    assert max(roots) == 2, "an outer and an inner agent in one ledger"


@pytest.mark.long
async def test_partial_rollouts_go_on_under_the_next_weights(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    before = await here.policy.backend.weight_version()  # type: ignore[attr-defined]
    ledgers = await partial_rollouts.main(here.policy, seconds=8.0)  # a busy vLLM may accept requests up to 3 s late
    for ledger in ledgers:
        (turn,) = ledger
        assert len(turn.draft.output_ids) == 400
        versions = [span.version for span in turn.draft.engine.versions]
        assert versions == [before, "step-1"]
        assert len(turn.draft.engine.responses) == 2
    assert float(capsys.readouterr().out.split("at most ")[1].split()[0]) < 1e-4


async def test_drift_is_counted_and_shown(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    changed, turns = await drift.main(here.policy)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"{changed} of {turns} turns")
    assert len(lines) == min(changed, drift.SHOWN) + 1


TRIES = 3
"""Enough questions: if all four answers to one are right, or all wrong, it trains nothing, as every third does."""


async def trained(here: Here, folder: Path) -> Any:
    """Train for three updates, restore the engine's weights, and return the results."""
    folder.mkdir()
    settings = Settings(updates=3, questions=2, copies=4, held_out=2, layers=2, passes=2)
    before: Any = await here.policy.backend.weight_version()  # type: ignore[attr-defined]
    try:
        with LearnerProcess(here.python, here.weights, settings.learner(), folder / "learner.log") as learner:
            training = Training(here.policy, learner, folder, settings)
            with Progress(disable=True) as progress:
                run = await training.train(progress)
            assert await training.admin.weight_version() == "step-3"
    finally:
        await here.policy.backend.load_weights(str(here.weights), "restored")  # type: ignore[attr-defined]
    assert [update["sampled_by"] for update in run.updates] == [[before], ["step-1"], ["step-2"]]
    return run


@pytest.mark.long  # test_weights_real.py changes weights in CI
async def test_three_updates_are_on_policy_and_move_the_engines_weights(here: Here, tmp_path: Path) -> None:
    for number in range(TRIES):
        run = await trained(here, tmp_path / str(number))
        if any(update["norm"] > 0 for update in run.updates[:-1]):
            break
    assert run.proof["ours"]["max"] <= 1e-3
    assert [round(edge, 3) for edge in run.proof["ours"]["ratio"]] == [1, 1, 1]
    for update in run.updates:  # the engine samples from what the learner has, after each change of weights too
        assert update["apart"][0] <= 1e-3
        assert update["sampled"] > 50
        assert 0 <= update["reward"] <= 1
    moved = [update["passes"][1]["ratio"] for update in run.updates if update["norm"] > 0]
    assert moved, "some group differed in reward"
    assert all(low < 0.999 and high > 1.001 for low, _, high in moved)
    assert run.updates[0]["kl"] < 1e-6 < run.updates[-1]["kl"]
    curves.keep(run, tmp_path / "page.md")
    assert (tmp_path / "page.svg").read_text().startswith("<?xml")
    kept = json.loads((tmp_path / "page.json").read_text())
    assert [each["sampled_by"] for each in kept[run.name]["updates"]] == [each["sampled_by"] for each in run.updates]
    assert curves.table(kept) == curves.table({run.name: asdict(run)})
    assert curves.table(kept) in (tmp_path / "page.md").read_text()


def trained_anew(settings: Settings) -> Any:
    """Run the example as its command line does, on servers of its own."""
    arguments = argparse.Namespace(backend="vllm", torch_index=None)
    with contextlib.ExitStack() as stack:
        training = prepare(arguments, settings, stack)
        with Progress(disable=True) as progress:
            return asyncio.run(training.train(progress))


@pytest.mark.long
def test_an_adapter_is_trained_and_each_version_of_it_samples_the_next_batch() -> None:
    run = trained_anew(replace(LORA, updates=3, questions=2, copies=4, held_out=2, layers=2))
    base = run.updates[0]["version"]
    assert [update["sampled_by"] for update in run.updates] == [[base], [f"{base}+step-1"], [f"{base}+step-2"]]
    for update in run.updates:  # the learner's adapter is the engine's
        assert update["apart"][0] <= 1e-3
        assert update["mismatch"]["ours"]["effective"] > 0.9999
    assert run.updates[0]["kl"] < 1e-6


@pytest.mark.long
def test_a_student_of_another_engines_model_comes_nearer_to_it() -> None:
    run = trained_anew(replace(DISTIL, updates=4, questions=2, copies=4, held_out=8))
    before, after = run.reverse_kl
    assert 0 < after < before
    assert [update["sampled_by"] for update in run.updates[1:]] == [["step-1"], ["step-2"], ["step-3"]]
    assert all(update["apart"][0] <= 1e-3 for update in run.updates)


def test_the_learner_equals_a_plain_implementation(here: Here, tmp_path: Path) -> None:
    model = models.ensure("qwen3-tiny", here.python)
    command = [here.python, CHECK, ROOT / "examples" / "training", model, tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
    assert done.stdout == "the same\n", done.stderr[-2000:]
