"""Rollouts through `collect` on one core, compared with those of benchmarks/concurrency.py, on one canned server.

    python benchmarks/collect.py [--json] [--quick]

A thousand rollouts at once, each with 2,000 tokens of context at the start, then five turns of 300 sampled tokens with
a tool call each, through Strands' `Agent`:

- `concurrency`: as in benchmarks/concurrency.py. Ledgers, models and agents are made before the measurement.
- `collect`: agents are made before; the measurement includes making ledgers and models, and writing rollouts and index.
- `made`, `collect_made`: as these two, but the measurement includes making everything, agents too.

Keys: `ratio` is the turns per second of CPU of `collect` over `concurrency`, `ratio_made` of `collect_made` over
`made`. `runs` holds the figures of every run, each the median of three alternating runs.
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
    """Run everything and return the figures."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    bound = {cores[0]} if len(cores) > 1 else None
    several: dict[str, list[Any]] = {name: [] for name in WHAT}
    with canned_server({cores[-1]} if bound else None) as port:
        client = Client(sys.executable, "collect_rollouts.py", str(port), cores=bound)
        for _ in range(3):
            for name, request in WHAT.items():
                several[name].append(client.ask(**request, context="2k", rollouts=rollouts, turns=TURNS))
        client.close()
    runs = {name: median(found) for name, found in several.items()}
    return {
        "ratio": ratio(runs, "collect", "concurrency"),
        "ratio_made": ratio(runs, "collect_made", "made"),
        "rollouts": rollouts,
        "runs": runs,
    }


def median(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: statistics.median(one[key] for one in found) for key in ("turns_per_cpu_s", "turns_per_s")}


def ratio(runs: dict[str, Any], ours: str, other: str) -> float:
    """Return one's turns per second of CPU over another's."""
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
    table = Table("", "turns per second of CPU", "turns a second", title=f"{found['rollouts']} rollouts at once")
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
