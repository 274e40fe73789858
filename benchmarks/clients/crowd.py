"""Many rollouts at once and their cost, equal for every client. Strands and the standard library only."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

from strands import Agent, ToolContext, tool

from conversation import SYSTEM, turn

BEAT_S = 0.005
gc.set_threshold(2_000, 10, 100)  # as in `tito collect` and docs/scaling.md, for every client
Seeded = tuple[Any, list[Any]]
"""A model that has processed its context, and the history so far, which ends with a question."""


def looking(turns: int) -> Any:
    """Return the tool of one rollout, which ends the rollout after a number of calls."""
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


SPECS: list[Any] = [looking(0).tool_spec]
"""The tool as an agent shows it to its model."""


def agent_of(seeded: Seeded, turns: int) -> Agent:
    """Return an agent that takes a number of turns, with a tool call each."""
    model, messages = seeded
    # The usage that Strands keeps with an answer and adds to.
    usage = {"inputTokens": 2000, "outputTokens": 300, "totalTokens": 2300}
    messages = [{**messages[0]}, {**messages[1], "metadata": {"usage": usage}}, {**messages[2]}]  # Strands writes there
    return Agent(
        model=model,
        messages=messages,
        tools=[looking(turns)],
        system_prompt=SYSTEM,
        callback_handler=None,
        load_tools_from_directory=False,
    )


async def through_agent(agent: Agent, turns: int) -> None:
    """Run an agent's turns."""
    await agent.invoke_async()
    answered = sum(message["role"] == "assistant" for message in agent.messages) - 1
    if answered < turns:
        raise RuntimeError(f"The agent took {answered} turns of {turns}.")


async def through_stream(seeded: Seeded, turns: int) -> None:
    """Run the turns at `Model.stream`."""
    model, messages = seeded
    messages = list(messages)
    for _ in range(turns):
        await turn(model, messages, SPECS)


async def crowd(make: Callable[[], Seeded], way: str, rollouts: int, turns: int) -> dict[str, Any]:
    """Run rollouts at once; return turns per second of CPU and of wall time, and the event loop's lag."""
    run: Any = through_agent if way == "agent" else through_stream

    def ready() -> Any:
        return agent_of(make(), turns) if way == "agent" else make()

    await run(ready(), turns)  # warm-up
    waiting = [ready() for _ in range(rollouts)]
    gc.collect()
    gc.freeze()
    lags: list[float] = []
    beating = asyncio.ensure_future(_beat(lags))
    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(run(one, turns) for one in waiting))
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
