"""The conformance suite over the real servers, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tito_engines as engines
from integration.test_weights_real import other_weights
from support.keeping import Keeper
from support.scripted import tokenizer
from tito_engines import install, models

pytestmark = pytest.mark.engine
FLOAT32_NATS = 1e-3
"""Tolerance for float32 servers; `docs/compatibility.md` has the measured values."""


def conformance(kind: str, url: str, folder: Path, *more: str, name: str = "smollm2") -> dict[str, Any]:
    """Run the command with the quick profile; return the verdicts, counts and the report."""
    tokenizer(name).save_pretrained(folder / "tokenizer")
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from strands_tito.cli import main; main()", "conformance"),
            *("--backend", kind, "--base-url", url, "--tokenizer", str(folder / "tokenizer")),
            *("--profile", "quick", "--tolerance", str(FLOAT32_NATS), "--report", str(folder / "out"), *more),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "out" / "conformance.json").read_text())
    return found | {"checks": {check["check"]: check for check in found["checks"]}}


@pytest.mark.parametrize(
    ("kind", "name"),  # both models on both engines would take .ci/run half an hour more
    [
        ("vllm", "smollm2"),
        ("sglang", "qwen3-tiny"),
        pytest.param("vllm", "qwen3-tiny", marks=pytest.mark.long),
        pytest.param("sglang", "smollm2", marks=pytest.mark.long),
    ],
)
def test_every_law_that_applies_holds(kind: str, name: str, keeper: Keeper, tmp_path: Path) -> None:
    found = conformance(kind, keeper.served(kind, name).url, tmp_path, name=name)
    checks = found["checks"]
    for name in ("prompt", "answers", "logprobs", "rescored", "rendering", "parent", "mask", "versions", "top"):
        assert checks[name]["verdict"] == "holds", name
    # How long the answers at each temperature are is chance, and SGLang's score says nothing of temperatures but 1.
    assert 2 * checks["rescored"]["passed"] > sum(checks["rescored"]["left_out"].values())


@pytest.mark.long  # test_parity_real.py compares the engines in CI
def test_the_two_servers_agree(keeper: Keeper, tmp_path: Path) -> None:
    against = ("--against-backend", "sglang", "--against-url", keeper.served("sglang").url)
    found = conformance("vllm", keeper.served("vllm").url, tmp_path, *against)
    for name in ("ledgers", "greedy", "agreed"):
        assert found["checks"][name]["verdict"] == "holds", name
    assert 0 < found["against"]["apart_nats"] <= FLOAT32_NATS


@pytest.mark.long  # test_weights_real.py changes weights under answers in CI
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_weights_change_under_answers(kind: str, tmp_path: Path) -> None:
    weights = models.ensure("qwen3-tiny", install.ensure(engines.find(kind)).python)
    folders = ("--weights", str(weights), "--weights", str(other_weights(weights, tmp_path / "other")))
    with engines.running_sync(kind, model="qwen3-tiny", dev_mode=True) as url:
        found = conformance(kind, url, tmp_path, *folders, name="qwen3-tiny")
    for name in ("changed", "live", "versions", "rescored"):
        assert found["checks"][name]["verdict"] == "holds", name
