"""Ctrl-C at any moment of `tito conformance`: it ends soon, says what is known, and leaves nothing behind.

TITO_INTERRUPTS says how often on each wire, TITO_SEED when (`make prove`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.conformance_command import served
from support.interrupted import Ended, run
from support.scripted import tokenizer
from tito_conformance.defect import Defect
from tito_conformance.defects import all_defects
from tito_core.testing import ScriptedServer

INTERRUPTS = int(os.environ.get("TITO_INTERRUPTS", "4"))
SEED = int(os.environ.get("TITO_SEED", "1"))
BROKEN = next(defect for defect, _ in all_defects() if defect.name == "length-called-stop")
OVER = 1.05
"""Moments are drawn up to this share of what a whole run takes, so that some come when it is over."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("wire", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("defect", "count"), [(None, INTERRUPTS - INTERRUPTS // 4), (BROKEN, INTERRUPTS // 4)], ids=["sound", "broken"]
)
def test_an_interrupt_at_any_moment_ends_it(wire: str, defect: Defect | None, count: int, tmp_path: Path) -> None:
    dice = random.Random(f"{SEED} {wire} {defect}")
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    with served(wire, defect) as server:
        whole = run(command(server, wire), tmp_path)
    assert whole.status == int(defect is not None), whole.out + whole.errors
    seen: Counter[str] = Counter()
    for number in range(count):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        after = (number + dice.random()) / count * whole.seconds * OVER
        with served(wire, defect) as server:
            ended = run(command(server, wire), tmp_path, after)
            until = time.monotonic() + 10
            while server.engine.running:
                assert time.monotonic() < until, f"a request was left running, after {after:.3f} s"
                time.sleep(0.01)
        where = f"after {after:.3f} s, status {ended.status}: {ended.out}\n{ended.errors}"
        assert not ended.noise, f"{ended.noise} {where}"
        seen[what_it_said(ended, tmp_path / "out", where)] += 1
    print(f"\n{count} interrupts on {wire}: {dict(seen)}")


def command(server: ScriptedServer, wire: str) -> Sequence[str]:
    at = ("--backend", wire, "--base-url", server.base_url, "--tokenizer", "tokenizer")
    return ("conformance", *at, "--profile", "quick", "--report", "out")


def what_it_said(ended: Ended, out: Path, where: str) -> str:
    """Name the stage in which it was interrupted, and check what that stage prints and writes."""
    if ended.status == 130:
        assert (ended.out, ended.errors) in (("", "Interrupted.\n"), ("", "")), where
        return "loading"
    if ended.status == 2 and "before anything was played" in ended.errors:
        assert not out.exists(), where
        return "connecting"
    found = json.loads((out / "conformance.json").read_text())
    assert found["interrupted"] == (ended.status == 2), where
    if ended.status == 2:
        assert "Interrupted: this is what is known so far." in ended.out, where
        law = "No law was broken by then." if found["broken"] is None else found["broken"]
        assert " ".join(law.split()) in " ".join(ended.out.split()), where
        return "playing" if found["broken"] is None else "making it smaller"
    assert ended.status == (0 if found["sound"] else 1), where
    return "over"
