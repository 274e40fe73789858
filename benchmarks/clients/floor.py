"""The floor: a bare aiohttp loop that posts ready-made bytes and reads the answer's, without looking at them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from conversation import CONTEXTS, TOOLS, TURNS, told

JSON = {"Content-Type": "application/json"}
PACE_S = 0.002
"""Other work between two posts of the paced floor, not timed: about what a client does of a turn beside its post."""


def body(tokens: int, echo: bool) -> bytes:
    """Make what a turn sends: ids of a usual length, and no more than it takes."""
    ids = [1000 + number * 7919 % 40000 for number in range(tokens)]
    fields = {"input_ids": ids, "sampling_params": {"max_new_tokens": 300, "temperature": 1.0}, "rid": "x" * 32}
    more = {"return_logprob": True, "logprob_start_len": -1, "return_prompt_token_ids": echo, "stream": False}
    return json.dumps({**fields, **more}, separators=(",", ":")).encode()


def other_work(seconds: float) -> None:
    """Take the caches away, as everything else that a client does of a turn would."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        json.loads(json.dumps(TOOLS * 4))


async def main(port: str) -> None:
    """Time what is asked for: {"name": "floor_echo", "context": "2k", "rollouts": 5}."""
    async with aiohttp.ClientSession() as session:

        async def answer(asked: Any) -> list[float]:
            content, spent = body(CONTEXTS[asked["context"]], "echo" in asked["name"]), []
            for _ in range(asked["rollouts"] * (TURNS + 1)):
                other_work(PACE_S if "paced" in asked["name"] else 0.0)
                began = time.process_time()
                async with session.post(f"http://127.0.0.1:{port}/generate", data=content, headers=JSON) as response:
                    await response.read()
                spent.append((time.process_time() - began) * 1e3)
            return spent[asked["rollouts"] :]

        await told(answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
