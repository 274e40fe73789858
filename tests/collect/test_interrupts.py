"""Ctrl-C and SIGTERM at any moment of `tito collect`: it ends soon, and in the end each rollout is there once.

TITO_INTERRUPTS says how often on each wire, TITO_SEED when (`make prove`).
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

from strands_tito.testing import ScriptedServer
from support.collect_command import HERE, command, expect_collected, lines, served, tokenizer_folder
from support.interrupted import WITHIN_S, Ended, run

INTERRUPTS = int(os.environ.get("TITO_INTERRUPTS", "3"))
SEED = int(os.environ.get("TITO_SEED", "1"))
GROUP = 4
CONNECTING = 12
"""Requests that connecting takes, and some more."""
EACH = 10
"""Rollouts for each interrupt: so many are finished before it at most, so that some are left for the last one."""
STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_interrupt_at_any_moment_ends_it_and_keeps_what_is_finished(kind: str, tmp_path: Path) -> None:
    dice = random.Random(f"{SEED} {kind}")
    tasks, out, folder = tmp_path / "tasks.jsonl", tmp_path / "out", tokenizer_folder(tmp_path)
    count = -(-INTERRUPTS * EACH // GROUP)
    tasks.write_text(
        "".join(json.dumps({"id": f"t{n}", "question": f"What is {n} * 17?"}) + "\n" for n in range(count))
    )
    wanted = {(f"t{number}", sample) for number in range(count) for sample in range(GROUP)}
    seen: Counter[str] = Counter()
    had: list[bytes] = []
    with served(kind, SEED, 0.02) as server:
        argv = command(kind, server, folder, tasks, out, "-n", str(GROUP), "--concurrency", "4")
        for number in range(INTERRUPTS):
            # One of three comes at some time, which is while it loads, the others at some request.
            timed = number % 3 == 0
            nth = len(server.engine.exchanges) + (0 if timed else dice.randint(1, CONNECTING + EACH))
            which = signal.SIGTERM if number % 4 == 3 and not timed else signal.SIGINT
            after_s = dice.uniform(0, 4.0 if timed else 0.1)
            ended = run(argv, HERE, after_s, partial(has_answered, server, nth), which)
            until = time.monotonic() + WITHIN_S
            while server.engine.running:
                assert time.monotonic() < until, "a request was left running"
                time.sleep(0.01)
            now = lines(out)
            assert now[: len(had)] == had, "a finished rollout is gone"
            had = now
            seen[what_it_said(ended, which, len(now), len(wanted))] += 1
        ended = run(argv, HERE)
        assert ended.status == 0, ended.errors
        assert lines(out)[: len(had)] == had
        expect_collected(out, server, wanted)
    print(f"\n{INTERRUPTS} interrupts on {kind}: {dict(seen)}")


def has_answered(server: ScriptedServer, count: int) -> bool:
    """Tell whether the server was asked so often."""
    return len(server.engine.exchanges) >= count


def what_it_said(ended: Ended, which: signal.Signals, there: int, wanted: int) -> str:
    """Name the stage in which it was interrupted, and check what that stage prints."""
    assert not ended.noise, ended.errors
    assert ended.out == ""
    if ended.status == 0:  # it was done before the interrupt came
        assert there == wanted, ended.errors
        return "over"
    assert ended.status == STATUSES[which], ended.errors
    if "rollouts are there" in ended.errors:
        assert f"{there:,} of {wanted:,} rollouts are there" in ended.errors
        return "collecting"
    assert ended.errors.splitlines()[-1:] in ([], ["Interrupted."], ["Interrupted before anything was collected."])
    return "connecting"
