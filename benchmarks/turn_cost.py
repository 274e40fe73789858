"""Client CPU of one turn at `Model.stream`, by context length, compared with peers and a floor, on one canned server.

    python benchmarks/turn_cost.py [--json] [--quick | --smallest]

A turn sends the whole context and receives 300 sampled tokens with logprobs and a tool call. The server is another
process and answers at once, so that only the client's CPU is counted (`time.process_time`); the first turn, which
processes the context, is not measured. Keys, each by context (2k, 32k, 128k), in milliseconds, medians:

- `ours_ms`: SGLang's wire with `verify_echo="first"`; `ours_echo_ms`: with the prompt's echo on every turn. Law 4 holds
  in both. `ours_vllm_ms` and `ours_vllm_echo_ms`: the same on vLLM's `/inference/v1/generate`.
- `floor_ms`, `floor_echo_ms`: a bare aiohttp loop that posts prepared bytes and reads the answer's bytes.
  `floor_paced_ms`, `floor_echo_paced_ms`: the same loop with 2 ms of other work, not measured, between two posts,
  because a loop without other work has all its code in the CPU caches.
- `strands_sglang_ms` (0.6.2, under Python 3.12), `strands_sglang_0_4_3_ms` and `strands_vllm_ms` (0.0.6, which streams
  chat completions): peers, each in its own environment in the user's cache, made at the first run; null if that fails.

`samples_ms` holds every sample, `ratios` ours over strands-sglang's. Clients are restarted several times, because a
process's memory layout makes it up to a tenth faster or slower for its lifetime.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from bench import PEERS, SMALLEST, Client, canned_server, options, peer_python, report, tokenizer_folder
from rich.table import Table

PASSES = (5, 2, 1)
"""Restarts of the clients, by size."""
ROUNDS = ({"2k": 5, "32k": 3, "128k": 2}, {"2k": 3, "32k": 2, "128k": 1}, {"2k": 1, "128k": 1})
"""Rollouts of each client and context in one pass, with ten measured turns each, by size."""
ROLLOUTS = 1
FLOORS = ("floor", "floor_echo", "floor_paced", "floor_echo_paced")
ROWS = ("ours", "ours_echo", "ours_vllm", "ours_vllm_echo", *FLOORS, *PEERS)


def measure(passes: int, rounds: dict[str, int], peers: bool) -> dict[str, dict[str, list[float]] | None]:
    """Run the clients alternately, restarted for each pass, and return the samples."""
    pythons = {name: peer_python(name) if peers else None for name in PEERS}
    samples: dict[str, Any] = {row: {at: [] for at in rounds} for row in ROWS if pythons.get(row, True) is not None}
    with canned_server() as port:
        for _ in range(passes):
            one_pass(port, pythons, rounds, samples)
    return {row: samples.get(row) for row in ROWS}


def one_pass(port: int, pythons: dict[str, Path | None], rounds: dict[str, int], samples: dict[str, Any]) -> None:
    """Start the clients, run them alternately, and add to the samples."""
    ours, floor = Client(sys.executable, "ours.py", str(port)), Client(sys.executable, "floor.py", str(port))
    clients = {row: floor if row.startswith("floor") else ours for row in ROWS if row not in PEERS}
    for name, python in pythons.items():
        script = "strands_vllm_turns.py" if name == "strands_vllm" else "strands_sglang_turns.py"
        if python is not None:
            clients[name] = Client(python, script, str(port), tokenizer_folder())
    for row, one in clients.items():
        one.ask(name=row, context="2k", rollouts=2)  # warm-up
    for at, count in rounds.items():
        for _ in range(count):
            for row, one in clients.items():
                # One rollout is enough of a peer that takes a tenth of a second per turn.
                samples[row][at] += one.ask(name=row, context=at, rollouts=1 if row == "strands_vllm" else ROLLOUTS)
    for one in set(clients.values()):
        one.close()


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--no-peers", action="store_true", help="leave peers out")
    arguments = parser.parse_args()
    peers = arguments.size != SMALLEST and not arguments.no_peers
    samples = measure(PASSES[arguments.size], ROUNDS[arguments.size], peers)
    medians = {
        name: None if of is None else {at: statistics.median(values) for at, values in of.items()}
        for name, of in samples.items()
    }
    results: dict[str, Any] = {f"{name}_ms": of for name, of in medians.items()}
    results["samples_ms"] = samples
    ours, peer = medians["ours"] or {}, medians["strands_sglang"] or {}
    results["ratios"] = {at: ours[at] / peer[at] for at in peer}
    table = Table("", *ROUNDS[arguments.size], title="CPU milliseconds of one turn, median")
    for name, of in medians.items():
        table.add_row(name, *(f"{of[at]:.2f}" if of else "-" for at in ROUNDS[arguments.size]))
    table.add_row("ours / strands_sglang", *(f"{results['ratios'][at]:.2f}" if peer else "-" for at in ours))
    report(arguments, results, table)


if __name__ == "__main__":
    main()
