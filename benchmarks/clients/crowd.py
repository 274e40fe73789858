"""Many rollouts at once, and what they cost: the same for every client. Strands and the standard library alone."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

from strands import Agent, ToolContext, tool

from conversation import SYSTEM, turn

BEAT_S = 0.005
Seeded = tuple[Any, list[Any]]
"""A model that has taken its context in, and the history so far, which ends in a question."""


def looking(turns: int) -> Any:
    """Make the tool of one rollout, which ends it after so many calls."""
    called = 0

    @tool(context=True)
    def look(n: int, tool_context: ToolContext) -> str:
        """Look something up.

        Args:
            n: What to look up.
            tool_context: Strands' own.
        """
        nonlocal called
        called += 1
        if called == turns:
            tool_context.agent.cancel(after_current_tools=True)
        return "It is 17."

    return look


async def through_agent(seeded: Seeded, turns: int) -> None:
    """Let an agent take its turns, a tool call each."""
    model, messages = seeded
    agent = Agent(
        model=model,
        messages=list(messages[:-1]),
        tools=[looking(turns)],
        system_prompt=SYSTEM,
        callback_handler=None,
        load_tools_from_directory=False,
    )
    await agent.invoke_async(messages[-1]["content"])
    answered = sum(message["role"] == "assistant" for message in agent.messages) - 1
    if answered < turns:
        raise RuntimeError(f"The agent took {answered} turns of {turns}.")


async def through_stream(seeded: Seeded, turns: int) -> None:
    """Take the turns at `Model.stream`."""
    model, messages = seeded
    messages = list(messages)
    for _ in range(turns):
        await turn(model, messages)


async def crowd(make: Callable[[], Seeded], way: str, rollouts: int, turns: int) -> dict[str, Any]:
    """Run rollouts at once; give turns a second of CPU and of time, and how late the event loop was."""
    seeded = [make() for _ in range(rollouts)]
    run = through_agent if way == "agent" else through_stream
    await run(make(), turns)  # what is done once is done
    gc.collect()
    gc.freeze()
    lags: list[float] = []
    beating = asyncio.ensure_future(_beat(lags))
    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(run(one, turns) for one in seeded))
    took, spent = time.perf_counter() - began, time.process_time() - spent
    beating.cancel()
    gc.unfreeze()
    lags.sort()
    return {
        "turns_per_cpu_s": rollouts * turns / spent,
        "turns_per_s": rollouts * turns / took,
        "lag_p99_ms": lags[int(len(lags) * 0.99)] * 1e3 if lags else None,
        "beats": len(lags),
    }


async def _beat(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        lags.append(time.perf_counter() - before - BEAT_S)
