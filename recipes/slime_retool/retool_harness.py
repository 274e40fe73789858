"""The same task, solved by a harness that knows nothing of Strands: a loop around Anthropic's messages."""

from __future__ import annotations

from typing import Any

import aiohttp

from retool_agent import MAX_TOOL_ITERS, SYSTEM_PROMPT, reward_of, run_code, run_python
from strands_tito import TITOModel
from strands_tito.gateway import HarnessAgent

SPEC = run_python.tool_spec
TOOL = {"name": SPEC["name"], "description": SPEC["description"], "input_schema": SPEC["inputSchema"]["json"]}


async def harness(url: str, question: str) -> tuple[str, int]:
    """Solve a problem at an address of Anthropic's API; return the last answer, and how often code ran."""
    said: list[dict[str, Any]] = [{"role": "user", "content": question}]
    body = {"model": "any", "max_tokens": 1024, "system": SYSTEM_PROMPT, "messages": said, "tools": [TOOL]}
    ran = 0
    async with aiohttp.ClientSession() as session:
        for _ in range(MAX_TOOL_ITERS):
            async with session.post(f"{url}/v1/messages", json=body) as reply:
                reply.raise_for_status()
                answer = (await reply.json())["content"]
            calls = [block for block in answer if block["type"] == "tool_use"]
            if not calls:
                break
            ran += 1
            results = [(call["id"], await run_code(call["input"]["code"])) for call in calls]
            content = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, text in results]
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": content}]
    return "".join(block.get("text", "") for block in answer), ran


def make_agent(model: TITOModel, sample: Any) -> Any:
    """Make what slime's loop takes for an agent; its harness's requests are turns of the rollout's ledger."""

    async def run(url: str, prompt: Any) -> None:
        answer, ran = await harness(url, prompt[0]["content"][0]["text"])
        message: Any = {"role": "assistant", "content": [{"text": answer}]}
        model.ledger.annotate("reward", reward_of([message], str(sample.label), ran))

    return HarnessAgent(model, run)
