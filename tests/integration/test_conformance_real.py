"""The conformance suite over the real servers, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.real import Served
from support.scripted import tokenizer

pytestmark = pytest.mark.engine
FLOAT32_NATS = 1e-3


def test_every_law_that_applies_holds(served: Served, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from tito_core.cli import main; main()", "conformance"),
            *("--backend", served.kind, "--base-url", served.url, "--tokenizer", str(tmp_path / "tokenizer")),
            *("--profile", "quick", "--tolerance", str(FLOAT32_NATS), "--report", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "conformance.json").read_text())
    verdicts = {check["check"]: check for check in found["checks"]}
    for name in ("prompt", "echo", "output", "logprobs", "rescored", "rendering", "parent", "mask", "versions"):
        assert verdicts[name]["verdict"] == "holds", name
    assert verdicts["rescored"]["passed"] > sum(verdicts["rescored"]["left_out"].values())
