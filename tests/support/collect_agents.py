"""Agents for tests of collecting."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import time
from collections.abc import Mapping
from typing import Any

from strands import Agent, tool

from tito_core import TITOModel


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b


def factory(model: TITOModel, task: Mapping[str, Any]) -> Agent:
    """Return an agent, which gets the task's prompt."""
    return Agent(model=model, tools=[multiply], callback_handler=None, load_tools_from_directory=False)


async def run(model: TITOModel, task: Mapping[str, Any]) -> float:
    """Ask the question, and return the answer's length as the reward."""
    result = await factory(model, task).invoke_async(str(task.get("question", "What is 25 * 17?")))
    return float(len(str(result)))


async def flaky(model: TITOModel, task: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fail at random in the agent's code, before or after a turn."""
    fate = random.random()
    if fate < 0.1:
        raise KeyError("before")
    reward = await run(model, task)
    if fate > 0.9:
        raise RuntimeError("after")
    return {"reward": reward, "solved": True}


async def stubborn(model: TITOModel, task: Mapping[str, Any]) -> float:
    """Answer the first task; ignore cancellation in all others."""
    while task["prompt"] != "What is 0 * 17?":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    return await run(model, task)


async def cancelling(model: TITOModel, task: Mapping[str, Any]) -> None:
    """Cancel every task of the event loop."""
    for each in asyncio.all_tasks():
        each.cancel()
    await asyncio.Event().wait()


async def forking(model: TITOModel, task: Mapping[str, Any]) -> float:
    """End a forked process of its own by SIGTERM; return its status as the reward."""
    forks = multiprocessing.get_context("fork")
    started = forks.Event()
    child = forks.Process(target=_wait, args=(started,))
    child.start()
    await asyncio.to_thread(started.wait, 10)
    child.terminate()
    await asyncio.to_thread(child.join, 10)
    status = child.exitcode
    child.kill()
    return 0.0 if status is None else float(status)


def _wait(started: Any) -> None:
    started.set()
    time.sleep(60)


async def named(model: TITOModel, task: Mapping[str, Any]) -> Any:
    """Do what the agent of the task's choice does."""
    return await globals()[task["agent"]](model, task)


async def leaving(model: TITOModel, task: Mapping[str, Any]) -> None:
    """Raise SystemExit in another asyncio task."""
    await asyncio.create_task(_leave())


async def _leave() -> None:
    raise SystemExit(0)


async def looking(model: TITOModel, task: Mapping[str, Any]) -> float:
    """Show a picture, answer each call with another, and return the number of pictures in the history as the reward."""
    from tito_conformance.testing.pictures import picture

    number = int(task["number"])

    @tool
    def look() -> dict[str, Any]:
        """Look again."""
        drawn = {"image": {"format": "png", "source": {"bytes": picture(100 + number, 96, 64)}}}
        return {"status": "success", "content": [drawn, {"text": "Seen again."}]}

    agent = Agent(model=model, tools=[look], callback_handler=None, load_tools_from_directory=False)
    shown = {"image": {"format": "png", "source": {"bytes": picture(number)}}}
    await agent.invoke_async([shown, {"text": "What is this?"}], limits={"turns": 3})
    return float(sum(len(turn.draft.media) for turn in model.ledger))
