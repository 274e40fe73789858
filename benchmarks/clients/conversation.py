"""The conversation that every client has, and how its turns are timed. Standard library alone: peers run it too."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

CONTEXTS = {"2k": 2_000, "32k": 32_000, "128k": 128_000}
TURNS = 10
"""Turns that are timed of each rollout, after the one that takes the context in. The first two or three after that are
slower for every client: garbage was collected before them, and a long prompt has taken the caches."""
SYSTEM = "You look things up."
TOOLS: list[Any] = [
    {
        "name": "look",
        "description": "Look something up.",
        "inputSchema": {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    }
]


def opening(tokens: int) -> list[Any]:
    """Begin a history of about so many tokens."""
    return [{"role": "user", "content": [{"text": "word " * tokens}]}]


def result(message: Any) -> Any:
    """Answer the calls of a message."""
    calls = [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]
    found = [{"toolUseId": call, "status": "success", "content": [{"text": "It is 17."}]} for call in calls]
    content: list[Any] = [{"toolResult": each} for each in found]
    return {"role": "user", "content": content or [{"text": "And then?"}]}


def message_of(events: list[Any]) -> Any:
    """Put an answer's events together, as Strands does."""
    blocks: list[Any] = []
    text, call, arguments = "", None, ""
    for event in events:
        if "contentBlockStart" in event:
            text, arguments = "", ""
            call = event["contentBlockStart"].get("start", {}).get("toolUse")
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            text += delta.get("text", "")
            arguments += delta.get("toolUse", {}).get("input", "")
        elif "contentBlockStop" in event:
            if call is not None:
                use = {"toolUseId": call["toolUseId"], "name": call["name"], "input": json.loads(arguments)}
                blocks.append({"toolUse": use})
            elif text:
                blocks.append({"text": text})
    return {"role": "assistant", "content": blocks}


async def turn(model: Any, messages: list[Any], tools: list[Any] = TOOLS) -> float:
    """Run one turn of `Model.stream` and go on with the history; give its CPU milliseconds."""
    began = time.process_time()
    events = [event async for event in model.stream(messages, tools, SYSTEM)]
    spent = (time.process_time() - began) * 1e3
    message = message_of(events)
    messages += [message, result(message)]
    return spent


async def told(answer: Callable[[Any], Awaitable[Any]]) -> None:
    """Answer one line of JSON after the other, until there is none: clients take turns, so that noise meets all alike.

    Args:
        answer: From what a line says to what is printed of it.
    """
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


async def timed(make_model: Callable[[], Any], tokens: int, rollouts: int) -> list[float]:
    """Give the CPU milliseconds of each timed turn of some rollouts."""
    spent = []
    for _ in range(rollouts):
        model, messages = make_model(), opening(tokens)
        await turn(model, messages)
        gc.collect()
        spent += [await turn(model, messages) for _ in range(TURNS)]
    return spent
