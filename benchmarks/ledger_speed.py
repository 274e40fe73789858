"""Speed of the ledger on one core: reading and verifying a file, and finding a turn's parent and committing it.

    python benchmarks/ledger_speed.py [--json] [--quick | --smallest]

Load and verify: read rollouts of 32k tokens in 40 turns, half of them sampled, from a file and check every law.
Commit: with a history of 800 messages (question, call, result, answer, and so on), deep-copied as Strands does, find
the parent, digest the new messages, check and commit the next turn. Turns follow each other in a loop on one growing
copy; `cold` uses a fresh copy of everything for each turn, so that neither the copy nor the code is in a CPU cache.
"""

from __future__ import annotations

import copy
import gc
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench import options, report
from rich.table import Table
from rollouts import answer_message, draft, prompt_message, rollout

from tito_core import store
from tito_core.ledger import Draft, Ledger
from tito_core.ledger.history import extended

TOKENS, TURNS = 32_000, 40
MESSAGES = 800
CONTEXTS = {"2k": 2_000, "32k": 32_000, "128k": 128_000}


def load_and_verify(count: int, repeats: int) -> list[float]:
    """Return tokens per second of CPU."""
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


def commit(length: int, repeats: int, *, cold: bool) -> list[float]:
    """Return CPU milliseconds of finding the parent and committing, on a growing copy or on a fresh one each time."""
    rng = np.random.default_rng(0)
    ledger, history, size = Ledger(), [{"system": "Be exact.", "tools": [], "template": "t"}], length // MESSAGES * 2
    for turn in range((MESSAGES - repeats) // 2):  # so that there are 800 in the middle of the measurement
        history.append(prompt_message(rng, turn, size))
        history.append(answer_message(rng, turn, size))
        _commit(ledger, history[:-1], history[-1], draft(rng, turn - 1 if turn else None, 0, size, b""), turn)
    coming = [
        (prompt_message(rng, turn, size), answer_message(rng, turn, size), draft(rng, turn - 1, 0, size, b""))
        for turn in range(len(ledger), len(ledger) + repeats)
    ]
    samples, shown = [], copy.deepcopy(history)
    for question, answer, content in coming:
        history.append(question)
        shown = copy.deepcopy(history) if cold else [*shown, copy.deepcopy(question)]
        samples.append(_commit(ledger, shown, answer, content, len(ledger)))
        history.append(answer)
        shown.append(copy.deepcopy(answer))
    return samples


def _commit(ledger: Ledger, history: list[Any], answer: Any, coming: Draft, index: int) -> float:
    """Find the parent, and commit after it; return the CPU milliseconds of both."""
    coming = replace(coming, prompt_length=ledger.path_length(coming.parent) + coming.columns.prompt)
    started = time.process_time_ns()
    match = ledger.match(history, coming.parent)
    parent = next((max(node.turns) for node in match.node.upward() if node.turns), None)
    object.__setattr__(coming, "fingerprint", extended(match.digest, answer))  # a real draft is made only now
    ledger.commit(coming, match, answer)
    taken = (time.process_time_ns() - started) / 1e6
    assert (parent, len(ledger)) == (coming.parent, index + 1)
    return taken


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    count, repeats = ((200, 7), (50, 3), (2, 1))[arguments.size]
    samples = {"load_verify_tokens_per_s": load_and_verify(count, repeats)}
    for name, length in CONTEXTS.items():
        repeats = (60, 20, 2)[arguments.size]
        samples[f"commit_ms_{name}"] = commit(length, repeats, cold=False)
        samples[f"commit_cold_ms_{name}"] = commit(length, repeats, cold=True)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    table = Table("what", "median", "best", "worst", title="the ledger on one core")
    for name, values in samples.items():
        worst_first = sorted(values, reverse="per_s" in name)
        table.add_row(name, *(f"{value:,.3g}" for value in (medians[name], worst_first[0], worst_first[-1])))
    report(arguments, {**medians, "messages": MESSAGES, "samples": samples}, table)


if __name__ == "__main__":
    main()
