"""Ctrl-C and SIGTERM at any moment of `tito collect`: it ends soon, and in the end the folder has each rollout once.

`make prove` sets TITO_INTERRUPTS (interrupts on each wire) and TITO_SEED (their moments).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from support.collect_command import HERE, command, expect_collected, served, written
from support.interrupted import WITHIN_S, Ended, run
from tito_conformance.testing import ScriptedServer

INTERRUPTS = int(os.environ.get("TITO_INTERRUPTS", "2"))
SEED = int(os.environ.get("TITO_SEED", "1"))
GROUP = 4
CONNECTING = 12
"""Upper bound on the requests of connecting."""
EACH = 10
"""Rollouts per interrupt, an upper bound on those finished before it, so that some are left for the last run."""
STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["vllm", "sglang"] if INTERRUPTS > 2 else ["sglang"])
def test_an_interrupt_at_any_moment_ends_it_and_keeps_what_is_finished(kind: str, folder: str, tmp_path: Path) -> None:
    dice = random.Random(f"{SEED} {kind}")
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    count = -(-INTERRUPTS * EACH // GROUP)
    tasks.write_text(
        "".join(json.dumps({"id": f"t{n}", "question": f"What is {n} * 17?"}) + "\n" for n in range(count))
    )
    expected = {(f"t{number}", sample) for number in range(count) for sample in range(GROUP)}
    seen: Counter[str] = Counter()
    had: list[bytes] = []
    with served(kind, SEED, 0.02) as server:
        argv = command(kind, server, folder, tasks, out, "-n", str(GROUP), "--concurrency", "4")
        for number in range(INTERRUPTS):
            # One of three interrupts comes at a random time, while the command loads; the others at a random request.
            timed = number % 3 == 0
            nth = len(server.engine.exchanges) + (0 if timed else dice.randint(1, CONNECTING + EACH))
            which = signal.SIGTERM if number % 4 == 3 and not timed else signal.SIGINT
            after_s = dice.uniform(0, 4.0 if timed else 0.1)
            ended = run(argv, HERE, after_s, partial(has_answered, server, nth), which)
            until = time.monotonic() + WITHIN_S
            while server.engine.running:
                assert time.monotonic() < until, "a request was left running"
                time.sleep(0.01)
            now = written(out)
            assert now[: len(had)] == had, "a finished rollout is gone"
            had = now
            seen[stage_of(ended, which, len(now), len(expected))] += 1
        ended = run(argv, HERE)
        assert ended.status == 0, ended.errors
        assert written(out)[: len(had)] == had
        expect_collected(out, server, expected)
    print(f"\n{INTERRUPTS} interrupts on {kind}: {dict(seen)}")


def has_answered(server: ScriptedServer, count: int) -> bool:
    """Return whether the server has had this many requests."""
    return len(server.engine.exchanges) >= count


def stage_of(ended: Ended, which: signal.Signals, there: int, expected: int) -> str:
    """Return the stage in which the command was interrupted, and check what that stage prints."""
    assert not ended.noise, ended.errors
    assert ended.out == ""
    if ended.status == 0:  # the command was done before the interrupt
        assert there == expected, ended.errors
        return "over"
    assert ended.status == STATUSES[which], ended.errors
    if "rollouts are finished" in ended.errors:
        assert f"{there:,} of {expected:,} rollouts are finished" in ended.errors
        return "collecting"
    assert ended.errors.splitlines()[-1:] in ([], ["Interrupted."], ["Interrupted before anything was collected."])
    return "connecting"
