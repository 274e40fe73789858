"""Rollouts for slime on real engines: the ids, masks and logprobs in its samples are the ledger's and the engine's.

Without slime's source, samples are objects with its recorded fields. Where SLIME_SRC points to it, its own `Sample`,
its loop, and its example with strands-sglang's import changed run on a real SGLang.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strands_tito.export import samples_of
from strands_tito.export.slime import STATUS, fields_of
from strands_tito.integrations.slime_generate import generate
from support import calculating
from support.real import Served
from support.scripted import tokenizer
from support.slime_facts import CONTRACT, PARAMETERS, SOURCE, Recorded, arguments, check_types
from support.trainer_packages import run
from tito_core.backend.generate import score
from tito_core.ledger import check_ledger

pytestmark = [pytest.mark.engine, pytest.mark.long]
EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = 12  # at temperature 1 this policy calls the tool in about two of five answers


async def rolled_out(served: Served, folder: Path, agent: str, **more: Any) -> tuple[list[Any], list[Any]]:
    """Run slime's `generate` on samples of one question; return its results and the ledgers, in order."""
    tokenizer().save_pretrained(folder)
    given = {"tito_agent": f"support.calculating:{agent}", "tito_backend": served.kind, **more}
    args = arguments(served.url, str(folder), **given)
    samples = [Recorded(index=number, group_index=7, prompt=calculating.QUESTION) for number in range(SAMPLES)]
    began = len(calculating.ledgers)
    parameters = {**PARAMETERS, "max_new_tokens": 64}
    found = await asyncio.gather(*(generate(args, sample, dict(parameters)) for sample in samples))
    return found, calculating.ledgers[began:]


async def expect_the_ledgers(served: Served, samples: list[Any], ledger: Any, expected: list[Any]) -> int:
    """Check that samples equal their trajectories, have slime's types, and that re-scoring confirms them."""
    check_ledger(ledger)
    trained = 0
    for sample, ours in zip(samples, expected, strict=True):
        expected_fields = fields_of(ours, decode=tokenizer().decode, temperature=1.0)
        check_types(sample, [name for name in expected_fields if name in CONTRACT["fields"]])
        start = ours.prompt_length
        assert sample.tokens == ours.token_ids.tolist()
        assert sample.response_length == len(sample.tokens) - start
        assert sample.loss_mask == ours.loss_mask[start:].tolist()
        assert sample.response == tokenizer().decode(sample.tokens[start:], skip_special_tokens=False)
        assert sample.status.name == STATUS[ours.termination]
        mask = np.array(sample.loss_mask, bool)
        scores = (await score(served.policy.backend, sample.tokens))[start:]
        assert np.abs(np.array(sample.rollout_log_probs) - scores)[mask].max(initial=0) <= 1e-4
        assert not np.array(sample.rollout_log_probs)[~mask].any()
        trained += int(mask.sum())
    return trained


@pytest.mark.parametrize("agent", ["make_agent", "make_editing_agent"])
async def test_generate_returns_slimes_fields(agent: str, served: Served, tmp_path: Path) -> None:
    found, ledgers = await rolled_out(served, tmp_path, agent)
    by_uuid = {ledger.uuid: ledger for ledger in ledgers}
    for number, samples in enumerate(found):
        ledger = by_uuid[samples[0].metadata["tito"]["rollout"]]
        assert {sample.rollout_id for sample in samples} == {number}
        assert ledger.header.group_id == "7"
        trained = await expect_the_ledgers(served, samples, ledger, samples_of(ledger))
        assert trained == sum(turn.draft.columns.output for turn in ledger)
    called = calculating.called(ledgers)
    assert called, "no rollout called the tool"
    branched = sum(len(samples) > 1 for samples in found)
    assert bool(branched) is (agent == "make_editing_agent")
    print(f"\n{served.kind}, {agent}: {SAMPLES} rollouts, {sum(map(len, found))} samples, {called} calls")


async def test_one_sample_per_rollout_if_slime_takes_no_lists(served: Served, tmp_path: Path) -> None:
    found, ledgers = await rolled_out(served, tmp_path, "make_agent", tito_branches="error")
    by_uuid = {ledger.uuid: ledger for ledger in ledgers}
    for sample in found:
        assert isinstance(sample, Recorded)
        ledger = by_uuid[sample.metadata["tito"]["rollout"]]
        await expect_the_ledgers(served, [sample], ledger, samples_of(ledger))


if SOURCE is not None:  # slime is in no package registry

    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("served", ["sglang"], indirect=True)
    def test_slimes_loop_and_its_example_run_on_a_real_sglang(served: Served) -> None:
        output = run("slime_engine_check.py", "slime", served.url, paths=[str(SOURCE), EXAMPLES])
        print("\n" + output)
        assert output.splitlines()[-1].startswith("slime on SGLang: ok, ")
