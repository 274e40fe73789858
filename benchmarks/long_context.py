"""What a long context costs: CPU, the longest stretch of the event loop, and memory.

    python benchmarks/long_context.py [--json] [--quick | --smallest]

One rollout after another on the canned server, each with a first turn that processes the context, and a second one.
By context, in milliseconds, medians of five rollouts (three up to 128k with --quick, one of 2k with --smallest):

- `first_ms`, `second_ms`: CPU of the turn, in all threads.
- `first_stretch_ms`, `second_stretch_ms`: the longest time that the event loop's thread computes between two rounds.
- `first_blocked_ms`: the longest such time in CPU of all threads. Includes what a thread computes while it keeps the
  interpreter from the event loop, and also what it computes beside it, so it is an upper bound.
- `held_mb`: megabytes that the rollout holds after its second turn, by tracemalloc, without the caller's own strings.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import canned_server, options, report
from rich.table import Table

from strands_tito import Policy, TITOModel
from tito_engines import models

sys.path.insert(0, str(Path(__file__).parent / "clients"))
from conversation import opening, turn

CONTEXTS = {"2k": 2_000, "32k": 32_000, "128k": 128_000, "512k": 512_000, "1M": 1_000_000}


class Rounds:
    """Measures the longest round of the event loop, by a clock, between `begin` and `end`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._longest = clock, 0.0
        self._beating: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Begin to measure."""
        self._longest, self._beating = 0.0, asyncio.ensure_future(self._beat())
        await asyncio.sleep(0)

    async def end(self) -> float:
        """Return the longest round in milliseconds."""
        await asyncio.sleep(0)  # the last round counts
        assert self._beating is not None
        self._beating.cancel()
        return self._longest * 1e3

    async def _beat(self) -> None:
        last = self._clock()
        while True:
            await asyncio.sleep(0)
            now = self._clock()
            self._longest, last = max(self._longest, now - last), now


async def rollout(make: Callable[[], TITOModel], tokens: int) -> dict[str, float]:
    """Run one rollout for each figure; what measures one of them would disturb the others."""
    found: dict[str, float] = {}
    model, messages = make(), opening(tokens)
    gc.collect()
    found["first_ms"] = await turn(model, messages)
    found["second_ms"] = await turn(model, messages)
    for name, clock in {"stretch": time.thread_time, "blocked": time.process_time}.items():
        model, messages, rounds = make(), opening(tokens), Rounds(clock)
        gc.collect()
        for which in ("first", "second"):
            await rounds.begin()
            await turn(model, messages)
            found[f"{which}_{name}_ms"] = await rounds.end()
    messages = opening(tokens)
    del model
    gc.collect()
    tracemalloc.start()
    model = make()
    await turn(model, messages)
    await turn(model, messages)
    gc.collect()
    found["held_mb"] = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    return found


async def measure(port: int, contexts: tuple[str, ...], rollouts: int) -> dict[str, dict[str, float]]:
    """Return the medians of each figure, by context."""
    tokenizer = models.load_tokenizer("smollm2")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)

    def make() -> TITOModel:
        return policy.model(sampling={"max_new_tokens": 300}, verify_echo="first")

    await rollout(make, 2_000)  # warm-up
    found: dict[str, Any] = {}
    for context in contexts:
        runs = [await rollout(make, CONTEXTS[context]) for _ in range(rollouts)]
        found[context] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    await policy.aclose()
    return found


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    contexts, rollouts = ((*CONTEXTS,), ("2k", "32k", "128k"), ("2k",))[arguments.size], (5, 3, 1)[arguments.size]
    with canned_server() as port:
        found = asyncio.run(measure(port, contexts, rollouts))
    table = Table("", *found, title="One rollout")
    for key in next(iter(found.values())):
        table.add_row(key, *(f"{of[key]:.1f}" for of in found.values()))
    report(arguments, found, table)


if __name__ == "__main__":
    main()
