"""A thousand rollouts at once on one core, beside strands-sglang, on one canned server.

    python benchmarks/concurrency.py [--json] [--quick]

Each rollout has its context taken in when the clock starts, and then takes five turns of 300 sampled tokens, a tool
call each: through Strands' `Agent`, or at `Model.stream`. The clients take turns on one core (where the system lets a
process be bound to one), the server has another. Keys:

- `agent_2k_ratio`, `agent_32k_ratio`, `stream_2k_ratio`, `stream_32k_ratio`: our turns a second of CPU over
  strands-sglang's (0.6.2; 0.4.3 where there is no Python 3.12), by way and context; null where it cannot be installed.
- `strands_ms_per_turn`: CPU of Strands' own loop around a model that takes none.
- `loop_lag_p99_ms`: how late the event loop was with a timer of 5 ms, of our runs the worst.
- `idle_rollout_bytes`: memory of a rollout that waits, its agent included, besides its tokens and its kept body, which
  `memory` tells (`tokens`, `body`, all of it `held`).

`runs` holds the figures of every run, by client, way and context.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from bench import Client, canned_server, peer_python, tokenizer_folder
from rich.console import Console
from rich.table import Table

WAYS = ("agent", "stream")
AT = ("2k", "32k")
TURNS = 5


def measure(rollouts: int) -> dict[str, Any]:
    """Run everything and give the figures."""
    python = peer_python("strands_sglang") or peer_python("strands_sglang_0_4_3")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    bound = {cores[0]} if len(cores) > 1 else None
    runs: dict[str, Any] = {"ours": {}, "strands_sglang": {}}
    with canned_server({cores[-1]} if bound else None) as port:
        clients = {"ours": Client(sys.executable, "ours_rollouts.py", str(port), cores=bound)}
        if python is not None:
            clients["strands_sglang"] = Client(
                python, "strands_sglang_rollouts.py", str(port), tokenizer_folder(), cores=bound
            )
        for way in WAYS:
            for at in AT:
                for name, one in clients.items():
                    asked = {"what": "crowd", "way": way, "context": at, "rollouts": rollouts, "turns": TURNS}
                    runs[name][f"{way}_{at}"] = one.ask(**asked)
        memory = clients["ours"].ask(what="memory", context="2k", rollouts=max(20, rollouts // 10), turns=TURNS)
        strands = clients["ours"].ask(what="strands", rollouts=rollouts // 5, turns=TURNS)
        for one in clients.values():
            one.close()
    return {
        **{f"{run}_ratio": ratio(runs, run) for run in runs["ours"]},
        "strands_ms_per_turn": strands,
        "loop_lag_p99_ms": max(run["lag_p99_ms"] for run in runs["ours"].values()),
        "idle_rollout_bytes": memory["idle"],
        "rollouts": rollouts,
        "memory": memory,
        "runs": runs,
    }


def ratio(runs: dict[str, Any], run: str) -> float | None:
    """Give our turns a second of CPU over theirs."""
    theirs = runs["strands_sglang"].get(run)
    found: float | None = theirs and runs["ours"][run]["turns_per_cpu_s"] / theirs["turns_per_cpu_s"]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rollouts")
    arguments = parser.parse_args()
    found = measure(100 if arguments.quick else 1000)
    if arguments.json:
        print(json.dumps(found))
        return
    table = Table("", "ours", "strands-sglang", "ratio", title=f"Turns a second of CPU, {found['rollouts']} at once")
    for run, ours in found["runs"]["ours"].items():
        theirs = found["runs"]["strands_sglang"].get(run)
        cells = (f"{theirs['turns_per_cpu_s']:.0f}", f"{found[f'{run}_ratio']:.2f}") if theirs else ("-", "-")
        table.add_row(run, f"{ours['turns_per_cpu_s']:.0f}", *cells)
    console = Console()
    console.print(table)
    memory = found["memory"]
    console.print(
        f"Strands' own loop {found['strands_ms_per_turn']:.2f} ms a turn; event loop late by at most "
        f"{found['loop_lag_p99_ms']:.0f} ms (p99); a waiting rollout {memory['held'] / 1e3:.0f} kB, of which "
        f"{memory['tokens'] / 1e3:.0f} tokens and {memory['body'] / 1e3:.0f} the kept body."
    )


if __name__ == "__main__":
    main()
