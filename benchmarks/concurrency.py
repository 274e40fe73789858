"""A thousand rollouts at once on one core, compared with strands-sglang, on one canned server.

    python benchmarks/concurrency.py [--json] [--quick | --smallest]

Each rollout has already processed its context when the measurement starts, and then takes five turns of 300 sampled
tokens with a tool call each: through Strands' `Agent`, or at `Model.stream`. The clients alternate on one core (if the
system supports binding a process to it); the server has another. Keys:

- `agent_2k_ratio`, `agent_32k_ratio`, `stream_2k_ratio`, `stream_32k_ratio`: our turns per second of CPU over
  strands-sglang's (0.6.2; 0.4.3 without Python 3.12), by way and context; null if it cannot be installed.
- `strands_ms_per_turn`: CPU of Strands' own loop around a model without any cost, at 2k; `strands_32k_ms_per_turn`: at
  32k, because Strands serialises the whole history for each turn's trace. `agent_ratios_of_no_time`: by context, the
  ratio of such a model without any cost.
- `loop_lag_p99_ms`: delay of a 5 ms timer of the event loop, the worst of our runs.
- `idle_rollout_bytes`: memory of an idle rollout with its agent, without its tokens and its request body, which are in
  `memory` (`tokens`, `body`; `held` is everything).

`runs` holds the figures of every run, by client, way and context.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from bench import SMALLEST, Client, canned_server, options, peer_python, report, tokenizer_folder
from rich.table import Table

WAYS = ("agent", "stream")
AT = ("2k", "32k")
TURNS = 5


def measure(rollouts: int, *, peers: bool) -> dict[str, Any]:
    """Run everything and return the figures."""
    python = (peer_python("strands_sglang") or peer_python("strands_sglang_0_4_3")) if peers else None
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
                    request = {"what": "crowd", "way": way, "context": at, "rollouts": rollouts, "turns": TURNS}
                    runs[name][f"{way}_{at}"] = one.ask(**request)
        memory = clients["ours"].ask(what="memory", context="2k", rollouts=max(20, rollouts // 10), turns=TURNS)
        alone = {at: clients["ours"].ask(what="strands", context=at, rollouts=rollouts, turns=TURNS) for at in AT}
        for one in clients.values():
            one.close()
    return {
        **{f"{run}_ratio": ratio(runs, run) for run in runs["ours"]},
        **{f"strands_{at}_ms_per_turn": 1e3 / run["turns_per_cpu_s"] for at, run in alone.items()},
        "strands_ms_per_turn": 1e3 / alone["2k"]["turns_per_cpu_s"],
        "agent_ratios_of_no_time": {at: ceiling(runs, at, run) for at, run in alone.items()},
        "loop_lag_p99_ms": max(run["lag_p99_ms"] for run in runs["ours"].values()),
        "idle_rollout_bytes": memory["idle"],
        "rollouts": rollouts,
        "memory": memory,
        "runs": runs,
    }


def ratio(runs: dict[str, Any], run: str) -> float | None:
    """Return our turns per second of CPU over theirs."""
    theirs = runs["strands_sglang"].get(run)
    found: float | None = theirs and runs["ours"][run]["turns_per_cpu_s"] / theirs["turns_per_cpu_s"]
    return found


def ceiling(runs: dict[str, Any], at: str, alone: dict[str, float]) -> float | None:
    """Return the ratio through `Agent` of a model without any cost."""
    theirs = runs["strands_sglang"].get(f"agent_{at}")
    found: float | None = theirs and alone["turns_per_cpu_s"] / theirs["turns_per_cpu_s"]
    return found


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    found = measure((1000, 100, 4)[arguments.size], peers=arguments.size != SMALLEST)
    table = Table("", "ours", "strands-sglang", "ratio", title=f"Turns per second of CPU, {found['rollouts']} at once")
    for run, ours in found["runs"]["ours"].items():
        theirs = found["runs"]["strands_sglang"].get(run)
        cells = (f"{theirs['turns_per_cpu_s']:.0f}", f"{found[f'{run}_ratio']:.2f}") if theirs else ("-", "-")
        table.add_row(run, f"{ours['turns_per_cpu_s']:.0f}", *cells)
    memory = found["memory"]
    report(
        arguments,
        found,
        table,
        f"Strands' own loop takes {found['strands_2k_ms_per_turn']:.2f} ms of a turn at 2k and "
        f"{found['strands_32k_ms_per_turn']:.2f} ms at 32k. With a model without any cost, the ratios through `Agent` "
        f"would be {_times(found)}. A timer of the event loop was at most {found['loop_lag_p99_ms']:.0f} ms late "
        f"(p99).\n"
        f"A waiting rollout takes {memory['held'] / 1e3:.0f} kB: {memory['tokens'] / 1e3:.0f} for its tokens and "
        f"{memory['body'] / 1e3:.0f} for its last request.",
    )


def _times(found: dict[str, Any]) -> str:
    return " and ".join("-" if most is None else f"{most:.2f}" for most in found["agent_ratios_of_no_time"].values())


if __name__ == "__main__":
    main()
