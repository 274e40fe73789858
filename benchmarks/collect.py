"""Rollouts through `collect` on one core, beside the same ones of benchmarks/concurrency.py, on one canned server.

    python benchmarks/collect.py [--json] [--quick]

A thousand at once, each with 2,000 tokens of context when the clock starts, and then five turns of 300 sampled tokens
with a tool call each, through Strands' `Agent`:

- `concurrency`: as benchmarks/concurrency.py runs them. Ledgers, models and agents are made before its clock starts.
- `collect`: agents are made before; ledgers and models are made, and rollouts and their index written, in its clock.
- `made`, `collect_made`: the two with everything made in their clocks, agents too, as whoever runs rollouts must.

Keys: `ratio` is collect's turns a second of CPU over concurrency's, `ratio_made` that of the two others. `runs` holds
the figures of every run, each the median of three, taken in turns.
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

TURNS = 5
WHAT: dict[str, dict[str, Any]] = {
    "concurrency": {"what": "crowd"},
    "collect": {"what": "collect", "ready": True},
    "made": {"what": "made"},
    "collect_made": {"what": "collect", "ready": False},
}


def measure(rollouts: int) -> dict[str, Any]:
    """Run everything and give the figures."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    bound = {cores[0]} if len(cores) > 1 else None
    several: dict[str, list[Any]] = {name: [] for name in WHAT}
    with canned_server({cores[-1]} if bound else None) as port:
        client = Client(sys.executable, "collect_rollouts.py", str(port), cores=bound)
        for _ in range(3):
            for name, asked in WHAT.items():
                several[name].append(client.ask(**asked, context="2k", rollouts=rollouts, turns=TURNS))
        client.close()
    runs = {name: median(found) for name, found in several.items()}
    return {
        "ratio": ratio(runs, "collect", "concurrency"),
        "ratio_made": ratio(runs, "collect_made", "made"),
        "rollouts": rollouts,
        "runs": runs,
    }


def median(found: list[dict[str, float]]) -> dict[str, float]:
    """Give the median of each figure."""
    return {key: statistics.median(one[key] for one in found) for key in ("turns_per_cpu_s", "turns_per_s")}


def ratio(runs: dict[str, Any], ours: str, other: str) -> float:
    """Give one's turns a second of CPU over another's."""
    return float(runs[ours]["turns_per_cpu_s"] / runs[other]["turns_per_cpu_s"])


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
    table = Table("", "turns a second of CPU", "turns a second", title=f"{found['rollouts']} rollouts at once")
    for name, run in found["runs"].items():
        table.add_row(name, f"{run['turns_per_cpu_s']:.0f}", f"{run['turns_per_s']:.0f}")
    console = Console()
    console.print(table)
    console.print(
        f"collect over concurrency {found['ratio']:.2f}; with ledgers, models and agents made in both clocks "
        f"{found['ratio_made']:.2f}."
    )


if __name__ == "__main__":
    main()
