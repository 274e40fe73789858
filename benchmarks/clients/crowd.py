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
gc.set_threshold(2_000, 10, 100)  # as `tito collect` has it and docs/scaling.md advises: for every client alike
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


SPECS: list[Any] = [looking(0).tool_spec]
"""The tool as an agent shows it to its model."""


def agent_of(seeded: Seeded, turns: int) -> Agent:
    """Make an agent that will take so many turns, a tool call each."""
    model, messages = seeded
    # What Strands keeps with an answer, and counts on from.
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
    """Let an agent take its turns."""
    await agent.invoke_async()
    answered = sum(message["role"] == "assistant" for message in agent.messages) - 1
    if answered < turns:
        raise RuntimeError(f"The agent took {answered} turns of {turns}.")


async def through_stream(seeded: Seeded, turns: int) -> None:
    """Take the turns at `Model.stream`."""
    model, messages = seeded
    messages = list(messages)
    for _ in range(turns):
        await turn(model, messages, SPECS)


async def crowd(make: Callable[[], Seeded], way: str, rollouts: int, turns: int) -> dict[str, Any]:
    """Run rollouts at once; give turns a second of CPU and of time, and how late the event loop was."""
    run: Any = through_agent if way == "agent" else through_stream

    def ready() -> Any:
        return agent_of(make(), turns) if way == "agent" else make()

    await run(ready(), turns)  # what is done once is done
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
