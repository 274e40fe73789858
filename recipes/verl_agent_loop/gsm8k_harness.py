"""The same task, solved by a harness that knows nothing of Strands: a loop around OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from gsm8k_agent import MAX_TOOL_ITERS, SYSTEM_PROMPT, calculate, reward_of
from strands_tito import TITOModel
from strands_tito.gateway import HarnessAgent

SPEC = calculate.tool_spec
TOOL = {"name": SPEC["name"], "description": SPEC["description"], "parameters": SPEC["inputSchema"]["json"]}


async def harness(url: str, question: str) -> str:
    """Solve a problem at an address of OpenAI's API, and return the last answer."""
    said: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    body = {"model": "any", "messages": said, "tools": [{"type": "function", "function": TOOL}]}
    async with aiohttp.ClientSession() as session:
        for _ in range(MAX_TOOL_ITERS):
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                reply.raise_for_status()
                said.append((await reply.json())["choices"][0]["message"])
            for call in said[-1].get("tool_calls") or ():
                result = calculate(**json.loads(call["function"]["arguments"]))
                said.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if said[-1]["role"] == "assistant":
                break
    return said[-1]["content"] or ""


def make_agent(model: TITOModel, row: Mapping[str, Any]) -> Any:
    """Make what verl's loop takes for an agent; its harness's requests are turns of the rollout's ledger."""

    async def run(url: str, prompt: Any) -> None:
        answer = await harness(url, prompt[0]["content"][0]["text"])
        message: Any = {"role": "assistant", "content": [{"text": answer}]}
        model.ledger.annotate("reward", reward_of([message], str(row["reward_model"]["ground_truth"])))

    return HarnessAgent(model, run)
