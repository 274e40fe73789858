"""Memory and file size of finished rollouts, in bytes per token.

    python benchmarks/ledger_memory.py [--json] [--quick | --smallest]

1,000 rollouts of 32k tokens (100 with --quick) in 40 turns and in 110, half of the tokens sampled. Memory is measured
with tracemalloc, and as the growth of the resident size of a process without tracemalloc. What a live rollout keeps by
reference to find the parents of later turns is printed separately, without the caller's own strings.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
from bench import SMALLEST, options, report
from rich.table import Table
from rollouts import rollout

from tito_core import store

TOKENS = 32_000
TURNS = (40, 110)
LIVE = 20
"""Live rollouts, to measure what they keep by reference."""


def traced(turns: int, count: int) -> float:
    """Return bytes per token by tracemalloc."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ledgers = [rollout(seed, TOKENS, turns) for seed in range(count)]
    gc.collect()
    return (tracemalloc.get_traced_memory()[0] - before) / tokens_of(ledgers)


def resident(turns: int, count: int) -> float:
    """Return bytes per token by the process's resident size."""
    rollout(0, TOKENS, turns)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    ledgers = [rollout(seed, TOKENS, turns) for seed in range(count)]
    gc.collect()
    return (process.memory_info().rss - before) / tokens_of(ledgers)


def retained(turns: int, count: int) -> float:
    """Return bytes per token of a live rollout's history: containers and entries, not the strings."""
    tracemalloc.start()
    ledgers = [rollout(seed, TOKENS, turns, messages=True) for seed in range(count)]
    gc.collect()
    live = tracemalloc.get_traced_memory()[0]
    strings = sum(len(text) for ledger in ledgers for message in ledger.retained() for text in texts(message))
    for ledger in ledgers:
        ledger.seal()
    gc.collect()
    return (live - tracemalloc.get_traced_memory()[0] - strings) / tokens_of(ledgers)


def texts(message: Any) -> list[str]:
    """List the long strings of a message, which are the caller's."""
    if isinstance(message, str):
        return [message] if len(message) > 100 else []
    items = message.values() if isinstance(message, dict) else message if isinstance(message, list) else ()
    return [text for item in items for text in texts(item)]


def on_disk(turns: int, count: int) -> float:
    """Return bytes per token of a file of rollouts."""
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.tito"
        with store.LedgerFile(path, "a") as file:
            for seed in range(count):
                ledger = rollout(seed, TOKENS, turns)
                file.append(ledger)
                total += tokens_of([ledger])
        return path.stat().st_size / total


def tokens_of(ledgers: list[Any]) -> int:
    """Count the tokens that ledgers hold."""
    return sum(turn.own_length for ledger in ledgers for turn in ledger)


def apart(measure: Any, *arguments: int) -> float:
    """Measure in a fresh process, so that earlier measurements do not interfere."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(measure, arguments))


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    count = (1000, 100, 2)[arguments.size]
    results: dict[str, Any] = {"rollouts": count, "tokens_each": TOKENS, "samples": {}}
    table = Table("turns", "memory", "resident", "file", "kept by reference while live", title="bytes per token")
    for turns in TURNS[:1] if arguments.size == SMALLEST else TURNS:
        found = {
            "memory_bytes_per_token": apart(traced, turns, count),
            "resident_bytes_per_token": apart(resident, turns, count),
            "file_bytes_per_token": apart(on_disk, turns, count),
            "retained_bytes_per_token": apart(retained, turns, min(count, LIVE)),
        }
        suffix = "" if turns == TURNS[0] else f"_{turns}_turns"
        results |= {name + suffix: value for name, value in found.items()}
        results["samples"] |= {name + suffix: [value] for name, value in found.items()}
        table.add_row(str(turns), *(f"{value:.2f}" for value in found.values()))
    report(arguments, results, table)


if __name__ == "__main__":
    main()
