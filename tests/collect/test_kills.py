"""`tito collect` is killed with SIGKILL at random moments; in the end the folder has each rollout once.

`make prove` sets TITO_ROLLOUTS (rollouts), TITO_KILLS (kills on each wire) and TITO_SEED (their moments).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from support.collect_command import command, expect_collected, lines, nursery, served, tokenizer_folder, wait_for

ROLLOUTS = int(os.environ.get("TITO_ROLLOUTS", "40"))
KILLS = int(os.environ.get("TITO_KILLS", "2"))
SEED = int(os.environ.get("TITO_SEED", "1"))
GROUP = 4
LATENCY_S = 0.02 if ROLLOUTS > 40 else 0.1
"""So long that on a busy machine, too, a few rollouts are not over before the process is killed."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["vllm", "sglang"] if ROLLOUTS > 40 else ["vllm"])
def test_killed_again_and_again_it_has_every_rollout_once(kind: str, tmp_path: Path) -> None:
    dice = random.Random(f"{SEED} {kind}")
    tasks, out, log = tmp_path / "tasks.jsonl", tmp_path / "out", tmp_path / "log"
    count = -(-ROLLOUTS // GROUP)
    tasks.write_text(
        "".join(json.dumps({"id": f"t{n}", "question": f"What is {n} * 17?"}) + "\n" for n in range(count))
    )
    expected = {(f"t{number}", sample) for number in range(count) for sample in range(GROUP)}
    had: list[bytes] = []
    busy = 0
    with served(kind, SEED, LATENCY_S) as server, nursery() as forks:
        argv = command(kind, server, tokenizer_folder(tmp_path), tasks, out, "-n", str(GROUP), "--concurrency", "16")
        for moment in sorted(dice.sample(range(len(expected) - 1), KILLS)):
            pid = forks.start(argv, log)
            wait_for(out, moment)
            if not busy or dice.random() < 0.5:  # in a generation; the rest at any moment
                soon = time.monotonic() + 2
                while not server.engine.running and time.monotonic() < soon:
                    time.sleep(LATENCY_S / 50)
            else:
                time.sleep(dice.uniform(0, 2 * LATENCY_S))
            busy += server.engine.running > 0
            os.kill(pid, signal.SIGKILL)
            assert forks.wait(pid) == -signal.SIGKILL, log.read_text()[-3000:]
            now = lines(out)
            assert now[: len(had)] == had, "a finished rollout is gone"
            had = now
        assert forks.wait(forks.start(argv, log)) == 0, log.read_text()[-3000:]
        now = lines(out)
        assert now[: len(had)] == had
        turns = expect_collected(out, server, expected)
    assert (
        f"{len(expected):,} of {len(expected):,} rollouts are finished, {len(had):,} of them by an earlier run."
        in log.read_text()
    )
    assert busy, "no kill happened while the engine was generating"
    print(f"\n{len(expected)} rollouts of {turns} turns on {kind}, after {KILLS} kills")
