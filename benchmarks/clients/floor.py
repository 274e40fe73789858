"""The floor: a bare aiohttp loop that posts prepared bytes and reads the answer's bytes without parsing them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from conversation import CONTEXTS, TOOLS, TURNS, serve

JSON = {"Content-Type": "application/json"}
PACE_S = 0.002
"""Seconds of other work between two posts of the paced floor, not measured: about the rest of a client's turn."""


def body(tokens: int, echo: bool) -> bytes:
    """Return the bytes of a minimal request, with ids of the usual length."""
    ids = [1000 + number * 7919 % 40000 for number in range(tokens)]
    fields = {"input_ids": ids, "sampling_params": {"max_new_tokens": 300, "temperature": 1.0}, "rid": "x" * 32}
    more = {"return_logprob": True, "logprob_start_len": -1, "return_prompt_token_ids": echo, "stream": False}
    return json.dumps({**fields, **more}, separators=(",", ":")).encode()


def other_work(seconds: float) -> None:
    """Evict the CPU caches, as the rest of a client's turn would."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        json.loads(json.dumps(TOOLS * 4))


async def main(port: str) -> None:
    """Measure the requested case: {"name": "floor_echo", "context": "2k", "rollouts": 5}."""
    async with aiohttp.ClientSession() as session:

        async def answer(request: Any) -> list[float]:
            content, spent = body(CONTEXTS[request["context"]], "echo" in request["name"]), []
            for _ in range(request["rollouts"] * (TURNS + 1)):
                other_work(PACE_S if "paced" in request["name"] else 0.0)
                began = time.process_time()
                async with session.post(f"http://127.0.0.1:{port}/generate", data=content, headers=JSON) as response:
                    await response.read()
                spent.append((time.process_time() - began) * 1e3)
            return spent[request["rollouts"] :]

        await serve(answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
