"""Rollouts through `collect` on one core, compared with those of benchmarks/concurrency.py, on one canned server.

    python benchmarks/collect.py [--json] [--quick | --smallest] [--workers]

A thousand rollouts at once, each with 2,000 tokens of context at the start, then five turns of 300 sampled tokens with
a tool call each, through Strands' `Agent`:

- `concurrency`: as in benchmarks/concurrency.py. Ledgers, models and agents are made before the measurement.
- `collect`: agents are made before; the measurement includes making ledgers and models, and writing rollouts.
- `made`, `collect_made`: as these two, but the measurement includes making everything, agents too.
- `workers`: CPU milliseconds of a rollout of five turns from a prompt of 2,000 tokens, through `collect` in this
  process ("0") and in 1 and 2 others: of the process that writes (`here_ms`) and of all (`all_ms`). All share one core,
  and `rollouts_per_s` is theirs together. With `--workers` only this is measured.

Keys: `ratio` is the turns per second of CPU of `collect` over `concurrency`, `ratio_made` of `collect_made` over
`made`. `runs` holds the figures of every run, each the median of three alternating runs.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

from bench import Client, canned_server, options, report
from rich.table import Table

TURNS = 5
WHAT: dict[str, dict[str, Any]] = {
    "concurrency": {"what": "crowd"},
    "collect": {"what": "collect", "ready": True},
    "made": {"what": "made"},
    "collect_made": {"what": "collect", "ready": False},
}


def measure(rollouts: int, *, only_workers: bool = False) -> dict[str, Any]:
    """Run everything and return the figures."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    bound = {cores[0]} if len(cores) > 1 else None
    several: dict[str, list[Any]] = {name: [] for name in WHAT}
    with canned_server({cores[-1]} if bound else None) as port:
        client = Client(sys.executable, "collect_rollouts.py", str(port), cores=bound)
        for _ in range(0 if only_workers else 3):
            for name, request in WHAT.items():
                several[name].append(client.ask(**request, context="2k", rollouts=rollouts, turns=TURNS))
        processes: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        for _ in range(3):
            for number, of in processes.items():
                of.append(client.ask(what="workers", workers=number, rollouts=rollouts // 4, turns=TURNS))
        client.close()
    workers = {number: median(of) for number, of in processes.items()}
    if only_workers:
        return {"workers": workers}
    runs = {name: median(found) for name, found in several.items()}
    return {
        "ratio": ratio(runs, "collect", "concurrency"),
        "ratio_made": ratio(runs, "collect_made", "made"),
        "rollouts": rollouts,
        "runs": runs,
        "workers": workers,
    }


def median(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def ratio(runs: dict[str, Any], ours: str, other: str) -> float:
    """Return one's turns per second of CPU over another's."""
    return float(runs[ours]["turns_per_cpu_s"] / runs[other]["turns_per_cpu_s"])


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--workers", action="store_true", help="only processes")
    arguments = parser.parse_args()
    found = measure((1000, 200, 4)[arguments.size], only_workers=arguments.workers)
    parts: list[Table | str] = []
    table = Table("processes", "ms of the writer", "ms of all", "rollouts a second", title="CPU of a rollout")
    for number, of in found["workers"].items():
        table.add_row(str(number), *(f"{of[key]:.1f}" for key in ("here_ms", "all_ms", "rollouts_per_s")))
    parts.append(table)
    if not arguments.workers:
        table = Table("", "turns per second of CPU", "turns a second", title=f"{found['rollouts']} rollouts at once")
        for name, run in found["runs"].items():
            table.add_row(name, f"{run['turns_per_cpu_s']:.0f}", f"{run['turns_per_s']:.0f}")
        parts += [
            table,
            f"collect over concurrency {found['ratio']:.2f}; with ledgers, models and agents made in both clocks "
            f"{found['ratio_made']:.2f}.",
        ]
    report(arguments, found, *parts)


if __name__ == "__main__":
    main()
