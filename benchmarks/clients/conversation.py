"""The conversation of every client, and the timing of its turns. Standard library only, because peers run it too."""

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
"""Measured turns of each rollout, after the one that processes the context. The first two or three are slower for
every client, because garbage was collected before them and the long prompt has evicted the CPU caches."""
SYSTEM = "You look things up."
TOOLS: list[Any] = [
    {
        "name": "look",
        "description": "Look something up.",
        "inputSchema": {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    }
]


def opening(tokens: int) -> list[Any]:
    """Return a history of about a number of tokens."""
    return [{"role": "user", "content": [{"text": "word " * tokens}]}]


def result(message: Any) -> Any:
    """Return the tool results for a message's calls."""
    calls = [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]
    found = [{"toolUseId": call, "status": "success", "content": [{"text": "It is 17."}]} for call in calls]
    content: list[Any] = [{"toolResult": each} for each in found]
    return {"role": "user", "content": content or [{"text": "And then?"}]}


def message_of(events: list[Any]) -> Any:
    """Assemble a message from stream events, as Strands does."""
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
    """Run one turn of `Model.stream`, extend the history, and return the CPU milliseconds."""
    began = time.process_time()
    events = [event async for event in model.stream(messages, tools, SYSTEM)]
    spent = (time.process_time() - began) * 1e3
    message = message_of(events)
    messages += [message, result(message)]
    return spent


async def serve(answer: Callable[[Any], Awaitable[Any]]) -> None:
    """Answer one line of JSON after the other until the input ends. Clients alternate, so that noise affects all alike.

    Args:
        answer: From what a line says to what is printed of it.
    """
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


async def timed(make_model: Callable[[], Any], tokens: int, rollouts: int) -> list[float]:
    """Return the CPU milliseconds of each measured turn of some rollouts."""
    spent = []
    for _ in range(rollouts):
        model, messages = make_model(), opening(tokens)
        await turn(model, messages)
        gc.collect()
        spent += [await turn(model, messages) for _ in range(TURNS)]
    return spent
