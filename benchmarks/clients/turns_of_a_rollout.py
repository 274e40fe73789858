"""Every turn of a long rollout at `Model.stream`, also with the whole conversation rendered and encoded before each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from conversation import SYSTEM, TOOLS, opening, serve, turn
from strands_tito import Policy, TITOModel
from tito_engines import models

FUNCTIONS = [
    {"type": "function", "function": {**each, "parameters": each["inputSchema"]["json"], "inputSchema": None}}
    for each in TOOLS
]


class Retokenizing:
    """A model before which each turn's conversation is rendered and encoded, as pipelines do that hold text."""

    def __init__(self, model: TITOModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    async def stream(self, messages: list[Any], *more: Any) -> AsyncIterator[Any]:
        """See `TITOModel.stream`."""
        shown = [{"role": "system", "content": SYSTEM}, *(part for message in messages for part in plain(message))]
        self._tokenizer.apply_chat_template(shown, tools=FUNCTIONS, add_generation_prompt=True)
        async for event in self._model.stream(messages, *more):
            yield event


def plain(message: Any) -> list[dict[str, Any]]:
    """Return a message of Strands as the template takes it."""
    results = [block["toolResult"]["content"][0]["text"] for block in message["content"] if "toolResult" in block]
    if results:
        return [{"role": "tool", "content": text} for text in results]
    text = "".join(block.get("text", "") for block in message["content"])
    uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
    calls = [{"function": {"name": use["name"], "arguments": use["input"]}} for use in uses]
    return [{"role": message["role"], "content": text, **({"tool_calls": calls} if calls else {})}]


async def main(port: str) -> None:
    """Return the CPU milliseconds of each turn: {"name": "retokenizing", "turns": 128}."""
    tokenizer = models.load_tokenizer("smollm2")
    url = f"http://127.0.0.1:{port}"
    policy = await Policy.connect_async(backend="sglang", base_url=url, tokenizer=tokenizer)

    async def answer(request: Any) -> list[float]:
        model: Any = policy.model(sampling={"max_new_tokens": 300}, verify_echo="first")
        if request["name"] == "retokenizing":
            model = Retokenizing(model, tokenizer)
        messages = opening(500)
        return [await turn(model, messages) for _ in range(request["turns"])]

    await serve(answer)
    await policy.backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
