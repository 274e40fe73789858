"""Speed of the ledger on one core: reading and verifying a file, and finding a turn's parent and committing it.

    python benchmarks/ledger_speed.py [--json] [--quick]

Load and verify: rollouts of 32k tokens in 40 turns, half of them sampled, read from a file and held to every law.
Commit: a history of 800 messages (tool results and calls with numbers in their input), deep-copied as Strands does;
its parent is found, the new messages are digested, and the next turn is packed, checked and committed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rollouts import answered, asked, draft, rollout

from tito_core import store
from tito_core.ledger import Ledger
from tito_core.ledger.histories import extended

TOKENS, TURNS = 32_000, 40
MESSAGES = 800
CONTEXTS = {"2k": 2_000, "32k": 32_000, "128k": 128_000}


def load_and_verify(count: int, repeats: int) -> list[float]:
    """Give tokens a second of CPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.tito"
        store.append(path, (rollout(seed, TOKENS, TURNS) for seed in range(count)))
        samples = []
        for _ in range(repeats):
            gc.collect()
            started = time.process_time()
            with store.LedgerFile(path) as file:
                tokens = sum(ledger[-1].path_length for ledger in file)
            samples.append(tokens / (time.process_time() - started))
    return samples


def commit(length: int, repeats: int) -> list[float]:
    """Give CPU milliseconds of finding the parent among 800 messages and committing."""
    rng = np.random.default_rng(0)
    ledger, history, size = Ledger(), [{"system": "Be exact.", "tools": [], "template": "t"}], length // MESSAGES * 2
    samples = []
    for turn in range(MESSAGES // 2 + repeats):
        history.append(asked(rng, turn, size))
        answer = answered(rng, turn, size)
        coming = draft(rng, turn - 1 if turn else None, ledger.path_length(turn - 1) if turn else 0, size, b"")
        shown: Any = copy.deepcopy(history)
        started = time.process_time_ns()
        walk = ledger.walk(shown)
        parent = max(walk.entry.turns, default=None)
        object.__setattr__(coming, "fingerprint", extended(walk.digest, answer))
        ledger.commit(coming, walk, answer)
        taken = (time.process_time_ns() - started) / 1e6
        assert parent == coming.parent
        history.append(answer)
        if turn >= MESSAGES // 2:
            samples.append(taken)
    return samples


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    count, repeats = (50, 3) if arguments.quick else (200, 7)
    samples = {"load_verify_tokens_per_s": load_and_verify(count, repeats)}
    for name, length in CONTEXTS.items():
        samples[f"commit_ms_{name}"] = commit(length, 50 if arguments.quick else 200)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    if arguments.json:
        print(json.dumps({**medians, "messages": MESSAGES, "samples": samples}))
        return
    table = Table("what", "median", "best", "worst", title="the ledger on one core")
    for name, values in samples.items():
        worst_first = sorted(values, reverse="per_s" in name)
        table.add_row(name, *(f"{value:,.3g}" for value in (medians[name], worst_first[0], worst_first[-1])))
    Console().print(table)


if __name__ == "__main__":
    main()
