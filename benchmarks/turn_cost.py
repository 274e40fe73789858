"""Client CPU of one turn at `Model.stream`, by context length, beside peers and a floor, on one canned server.

    python benchmarks/turn_cost.py [--json] [--quick]

A turn sends the whole context and takes 300 sampled tokens with their logprobs, a tool call among them. The server is a
process of its own and answers at once, so that only the client's CPU is counted (`time.process_time`); the turn that
takes the context in is not timed. Keys, each by context (2k, 32k, 128k), in milliseconds, medians:

- `ours_ms`: SGLang's wire with `verify_echo="first"`; `ours_echo_ms`: with the prompt's echo on every turn. Law 4 is in
  force in both. `ours_vllm_ms` and `ours_vllm_echo_ms`: the same on vLLM's `/inference/v1/generate`.
- `floor_ms`, `floor_echo_ms`: a bare aiohttp loop that posts ready-made bytes and reads the answer's.
  `floor_paced_ms`, `floor_echo_paced_ms`: the same loop with 2 ms of other work, not timed, between two posts, since a
  loop that does nothing else finds all of its code in the caches and the server still awake.
- `strands_sglang_ms` (0.6.2, under Python 3.12), `strands_sglang_0_4_3_ms` and `strands_vllm_ms` (0.0.6, which streams
  chat completions): peers, each in an environment of its own under the user's cache, made at the first run; null where
  that cannot be.

`samples_ms` holds every sample, `bounds` what the figures are held to. Clients are started anew several times, since
where a process happens to lie in memory makes it up to a tenth faster or slower for as long as it lives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import PEERS, Client, canned_server, peer_python, tokenizer_folder
from rich.console import Console
from rich.table import Table

PASSES = {True: 2, False: 5}
"""By whether it is quick: how often the clients are started anew."""
ROUNDS = {True: {"2k": 3, "32k": 2, "128k": 1}, False: {"2k": 5, "32k": 3, "128k": 2}}
"""How often each client takes its turn at a context in one pass, a rollout of ten timed turns each."""
ROLLOUTS = 1
FLOORS = ("floor", "floor_echo", "floor_paced", "floor_echo_paced")
ROWS = ("ours", "ours_echo", "ours_vllm", "ours_vllm_echo", *FLOORS, *PEERS)


def measure(passes: int, rounds: dict[str, int], peers: bool) -> dict[str, dict[str, list[float]] | None]:
    """Let the clients take turns, started anew for each pass, and give the samples."""
    pythons = {name: peer_python(name) if peers else None for name in PEERS}
    samples: dict[str, Any] = {row: {at: [] for at in rounds} for row in ROWS if pythons.get(row, True) is not None}
    with canned_server() as port:
        for _ in range(passes):
            one_pass(port, pythons, rounds, samples)
    return {row: samples.get(row) for row in ROWS}


def one_pass(port: int, pythons: dict[str, Path | None], rounds: dict[str, int], samples: dict[str, Any]) -> None:
    """Start every client, let them take turns, and add to the samples."""
    ours, floor = Client(sys.executable, "ours.py", str(port)), Client(sys.executable, "floor.py", str(port))
    clients = {row: floor if row.startswith("floor") else ours for row in ROWS if row not in PEERS}
    for name, python in pythons.items():
        script = "strands_vllm_turns.py" if name == "strands_vllm" else "strands_sglang_turns.py"
        if python is not None:
            clients[name] = Client(python, script, str(port), tokenizer_folder())
    for row, one in clients.items():
        one.ask(name=row, context="2k", rollouts=2)  # what is done once is done
    for at, count in rounds.items():
        for _ in range(count):
            for row, one in clients.items():
                # A peer that takes a tenth of a second a turn has said enough after one.
                samples[row][at] += one.ask(name=row, context=at, rollouts=1 if row == "strands_vllm" else ROLLOUTS)
    for one in set(clients.values()):
        one.close()


def bounds(medians: dict[str, dict[str, float] | None]) -> dict[str, tuple[float, float]]:
    """Give each bound: the ratio that was found and the largest that is allowed."""
    ours = medians["ours"] or {}
    found = {}
    for row, most in (("", 5.0), ("_echo", 3.0)):
        for pace in ("", "_paced"):
            of, floor = medians[f"ours{row}"] or {}, medians[f"floor{row}{pace}"] or {}
            found |= {f"ours{row} / floor{row}{pace} at {at}": (of[at] / floor[at], most) for at in of}
    found["ours, 128k / 2k"] = (ours["128k"] / ours["2k"], 2.0)
    if peer := medians["strands_sglang"]:
        found["ours / strands-sglang at 32k"] = (ours["32k"] / peer["32k"], 1 / 3)
        found["ours / strands-sglang at 128k"] = (ours["128k"] / peer["128k"], 1 / 8)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer rollouts: under a minute")
    parser.add_argument("--no-peers", action="store_true", help="leave peers out")
    arguments = parser.parse_args()
    samples = measure(PASSES[arguments.quick], ROUNDS[arguments.quick], not arguments.no_peers)
    medians = {
        name: None if of is None else {at: statistics.median(values) for at, values in of.items()}
        for name, of in samples.items()
    }
    held = bounds(medians)
    if arguments.json:
        results: dict[str, Any] = {f"{name}_ms": of for name, of in medians.items()}
        results["samples_ms"] = samples
        results["bounds"] = {name: {"found": found, "at_most": most} for name, (found, most) in held.items()}
        print(json.dumps(results))
        return
    table = Table("", *ROUNDS[True], title="CPU milliseconds of one turn, median")
    for name, of in medians.items():
        table.add_row(name, *(f"{of[at]:.2f}" if of else "-" for at in ROUNDS[True]))
    checked = Table("bound", "found", "at most", "")
    for name, (found, most) in held.items():
        checked.add_row(name, f"{found:.3f}", f"{most:.3f}", "holds" if found <= most else "does not hold")
    console = Console()
    console.print(table)
    console.print(checked)


if __name__ == "__main__":
    main()
