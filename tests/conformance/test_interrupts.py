"""Ctrl-C at any moment of `tito conformance`: it ends soon, reports the results so far, and leaves no request running.

TITO_INTERRUPTS sets the number of interrupts on each wire, and TITO_SEED their moments (`make prove`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from conformance.defects import all_defects
from conformance.defects.defect import Defect
from support.conformance_command import served
from support.interrupted import WITHIN_S, Ended, run
from support.scripted import tokenizer
from tito_conformance.player import _cancelled_answer
from tito_conformance.testing import ScriptedServer
from tito_conformance.testing import moves as m

pytestmark = pytest.mark.suite

INTERRUPTS = int(os.environ.get("TITO_INTERRUPTS", "0"))
SEED = int(os.environ.get("TITO_SEED", "1"))
BROKEN = next(defect for defect, _ in all_defects() if defect.name == "length-called-stop")
JITTER_S = 0.1
"""Longest time between a request and the interrupt after it, in seconds."""


def counts(wire: str) -> tuple[tuple[Defect | None, int], ...]:
    """Return the number of interrupts of a sound and of a broken server."""
    if INTERRUPTS:
        return (None, INTERRUPTS - INTERRUPTS // 4), (BROKEN, INTERRUPTS // 4)
    return ((None, 1),) if wire == "vllm" else ((BROKEN, 1),)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_an_interrupt_at_any_moment_ends_the_run(wire: str, tmp_path: Path) -> None:
    dice = random.Random(f"{SEED} {wire}")
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    seen: Counter[str] = Counter()
    for defect, count in counts(wire):
        with served(wire, defect) as server:
            whole = run(command(server, wire), tmp_path)
            requests = len(server.engine.exchanges)
        assert whole.status == int(defect is not None), whole.out + whole.errors
        for number in range(count):
            # One of three comes at a random time, which may be before the first request. The others come at a random
            # request, whose number does not depend on how busy the machine is.
            timed = number % 3 == 2
            after_s = dice.uniform(0, whole.seconds if timed else JITTER_S)
            nth = 0 if timed else dice.randint(1, requests)
            seen[interrupted(wire, defect, after_s, nth, tmp_path)] += 1
    print(f"\n{seen.total()} interrupts on {wire}: {dict(seen)}")


def interrupted(wire: str, defect: Defect | None, after_s: float, nth: int, cwd: Path) -> str:
    """Interrupt a run some seconds after the nth request, and return the stage that it was in."""
    shutil.rmtree(cwd / "out", ignore_errors=True)
    with served(wire, defect) as server:
        ended = run(command(server, wire), cwd, after_s, lambda: len(server.engine.exchanges) >= nth)
        until = time.monotonic() + WITHIN_S
        while server.engine.running:
            assert time.monotonic() < until, "a request was left running"
            time.sleep(0.01)
    where = f"{after_s:.3f} s after request {nth}, status {ended.status}: {ended.out}\n{ended.errors}"
    assert not ended.noise, f"{ended.noise} {where}"
    return stage_of(ended, cwd / "out", where)


def command(server: ScriptedServer, wire: str) -> Sequence[str]:
    at = ("--backend", wire, "--base-url", server.base_url, "--tokenizer", "tokenizer")
    return ("conformance", *at, "--profile", "quick", "--report", "out")


def stage_of(ended: Ended, out: Path, where: str) -> str:
    """Return the stage that was interrupted, and check its output and files."""
    if ended.status == 130:
        assert (ended.out, ended.errors) in (("", "Interrupted.\n"), ("", "")), where
        return "loading"
    if ended.status == 2 and "before the first conversation" in ended.errors:
        assert not (out / "conformance.json").exists(), where
        return "connecting"
    report = json.loads((out / "conformance.json").read_text())
    assert report["interrupted"] == (ended.status == 2), where
    if ended.status == 2:
        assert "Interrupted. Results so far:" in ended.out, where
        law = "No law was broken so far." if report["broken"] is None else report["broken"]
        assert " ".join(law.split()) in " ".join(ended.out.split()), where
        return "playing" if report["broken"] is None else "shrinking"
    assert ended.status == (0 if report["sound"] else 1), where
    return "finished"


@pytest.mark.parametrize("how", ["task", "close", "signal"])
@pytest.mark.parametrize("when", ["before the move cancels", "during the abort"])
def test_a_run_that_is_stopped_during_a_cancel_stops(how: Literal["task", "close", "signal"], when: str) -> None:
    async def play() -> None:
        begun, aborting, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def stream() -> AsyncGenerator[Any]:
            try:
                begun.set()
                await asyncio.Event().wait()
                yield {}
            finally:
                aborting.set()
                for _ in range(5):
                    await asyncio.sleep(0)
                ended.set()

        after_s = 600.0 if when.startswith("before") else 0.0
        signal = threading.Event()
        move = asyncio.create_task(_cancelled_answer(stream(), signal, m.Cancel(how=how, after_s=after_s)))
        await begun.wait()
        if when.startswith("before") or how == "signal":  # nobody reads the signal here, so the stream waits on
            for _ in range(5):
                await asyncio.sleep(0)
        else:
            await aborting.wait()
        move.cancel()
        await asyncio.wait({move})
        assert move.cancelled()
        assert ended.is_set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())
