"""How much of an agent's turn Strands spends on writing the history into a trace that nobody reads.

    python benchmarks/trace_cost.py [--json] [--quick | --smallest]

No exporter is configured. By context: CPU milliseconds of a turn through Strands' `Agent` (`agent_ms`), the same
without the histories in its traces (`untraced_ms`), and the `share` that they take. Medians of three alternating runs
of 20 rollouts at once, five turns each (--quick: one run; --smallest: of one rollout, at 2k).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path
from unittest.mock import patch

from bench import canned_server, options, report
from rich.table import Table
from strands.telemetry.tracer import Tracer

from strands_tito import Policy
from tito_engines import models

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from conversation import CONTEXTS
from crowd import crowd
from ours_rollouts import Seeds

TURNS = 5


async def measure(port: int, contexts: tuple[str, ...], runs: int, rollouts: int) -> dict[str, dict[str, float]]:
    """Return the figures by context."""
    tokenizer = models.load_tokenizer("smollm2")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)
    found = {}
    for context in contexts:
        seeds = await Seeds.of(policy, CONTEXTS[context])
        traced, untraced = [], []
        for _ in range(runs):
            traced.append(await crowd(seeds, "agent", rollouts, TURNS))
            with patch.object(Tracer, "_add_event_messages", lambda *_: None):
                untraced.append(await crowd(seeds, "agent", rollouts, TURNS))
        agent_ms, untraced_ms = (
            statistics.median(1e3 / one["turns_per_cpu_s"] for one in of) for of in (traced, untraced)
        )
        found[context] = {"agent_ms": agent_ms, "untraced_ms": untraced_ms, "share": 1 - untraced_ms / agent_ms}
    await policy.aclose()
    return found


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    contexts, runs, rollouts = ((tuple(CONTEXTS), 3, 20), (tuple(CONTEXTS), 1, 20), (("2k",), 1, 1))[arguments.size]
    with canned_server() as port:
        found = asyncio.run(measure(port, contexts, runs, rollouts))
    table = Table("", *found, title="A turn through Strands' Agent")
    for key in ("agent_ms", "untraced_ms", "share"):
        table.add_row(key, *(f"{of[key]:.2f}" for of in found.values()))
    report(arguments, found, table)


if __name__ == "__main__":
    main()
