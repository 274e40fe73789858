"""Rollouts through `collect` on one core, beside the same ones of benchmarks/concurrency.py, on one canned server.

    python benchmarks/collect.py [--json] [--quick]

A thousand at once, each with 2,000 tokens of context when the clock starts, and then turns of 300 sampled tokens with a
tool call each, through Strands' `Agent`. By turns a rollout:

- `concurrency`: as benchmarks/concurrency.py runs them. Ledgers, models and agents are made before its clock starts.
- `made`: the same, made while its clock runs, as whoever runs rollouts must.
- `collect`: made while its clock runs, and written to a folder with its index.

Keys: `ratio` is collect's turns a second of CPU over concurrency's, `ratio_made` over those made in its clock,
both with five turns a rollout; `ratio_15` and `ratio_15_made` with fifteen. `runs` holds the figures of every run, each the median
of three, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import Any

from bench import Client, canned_server
from rich.console import Console
from rich.table import Table

TURNS = (5, 15)  # Strands keeps 40 messages
WHAT = {"concurrency": "crowd", "made": "made", "collect": "collect"}


def measure(rollouts: int) -> dict[str, Any]:
    """Run everything and give the figures."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    bound = {cores[0]} if len(cores) > 1 else None
    runs: dict[str, Any] = {}
    with canned_server({cores[-1]} if bound else None) as port:
        client = Client(sys.executable, "collect_rollouts.py", str(port), cores=bound)
        for turns in TURNS:
            several: dict[str, list[Any]] = {name: [] for name in WHAT}
            for _ in range(3):
                for name, what in WHAT.items():
                    count = rollouts * TURNS[0] // turns
                    several[name].append(client.ask(what=what, context="2k", rollouts=count // 4 * 4, turns=turns))
            runs[str(turns)] = {name: median(found) for name, found in several.items()}
        client.close()
    five, fifteen = runs["5"], runs["15"]
    return {
        "ratio": ratio(five, "concurrency"),
        "ratio_made": ratio(five, "made"),
        "ratio_15": ratio(fifteen, "concurrency"),
        "ratio_15_made": ratio(fifteen, "made"),
        "rollouts": rollouts,
        "runs": runs,
    }


def median(found: list[dict[str, float]]) -> dict[str, float]:
    """Give the median of each figure."""
    return {key: statistics.median(one[key] for one in found) for key in ("turns_per_cpu_s", "turns_per_s")}


def ratio(runs: dict[str, Any], other: str) -> float:
    """Give collect's turns a second of CPU over another's."""
    return float(runs["collect"]["turns_per_cpu_s"] / runs[other]["turns_per_cpu_s"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rollouts")
    arguments = parser.parse_args()
    found = measure(200 if arguments.quick else 1000)
    if arguments.json:
        print(json.dumps(found))
        return
    table = Table("turns a rollout", *WHAT, title="Turns a second of CPU")
    for turns, runs in found["runs"].items():
        table.add_row(turns, *(f"{runs[name]['turns_per_cpu_s']:.0f}" for name in WHAT))
    console = Console()
    console.print(table)
    console.print(
        f"collect over concurrency {found['ratio']:.2f} (5 turns), {found['ratio_15']:.2f} (15 turns); over rollouts "
        f"made in the clock {found['ratio_made']:.2f} and {found['ratio_15_made']:.2f}."
    )


if __name__ == "__main__":
    main()
