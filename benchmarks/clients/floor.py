"""The floor: a bare aiohttp loop that posts ready-made bytes and reads the answer's, without looking at them."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Any

import aiohttp
from conversation import CONTEXTS, TURNS


def body(tokens: int, echo: bool) -> bytes:
    """Make what a turn sends: ids of a usual length, and no more than it takes."""
    ids = [1000 + number * 7919 % 40000 for number in range(tokens)]
    fields = {"input_ids": ids, "sampling_params": {"max_new_tokens": 300, "temperature": 1.0}, "rid": "x" * 32}
    more = {"return_logprob": True, "logprob_start_len": -1, "return_prompt_token_ids": echo, "stream": False}
    return json.dumps({**fields, **more}, separators=(",", ":")).encode()


async def main(port: int, rollouts: dict[str, int]) -> None:
    """Print the samples as JSON."""
    samples: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session:
        for name, echo in (("floor", False), ("floor_echo", True)):
            samples[name] = {}
            for at, count in rollouts.items():
                content, spent = body(CONTEXTS[at], echo), []
                for number in range(3 + count * TURNS):
                    if number < 3:
                        gc.collect()
                    began = time.process_time()
                    async with session.post(
                        f"http://127.0.0.1:{port}/generate", data=content, headers={"Content-Type": "application/json"}
                    ) as response:
                        await response.read()
                    spent.append((time.process_time() - began) * 1e3)
                samples[name][at] = spent[3:]
    print(json.dumps(samples))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(given["port"], given["rollouts"]))
