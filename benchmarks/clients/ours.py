"""Our turns at `Model.stream`, on both wires, without and with the prompt's echo."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from conversation import CONTEXTS, serve, timed
from strands_tito import Policy
from tito_engines import models


async def main(port: str) -> None:
    """Measure the requested case: {"name": "ours_vllm_echo", "context": "2k", "rollouts": 5}."""
    tokenizer = models.load_tokenizer("smollm2")
    url = f"http://127.0.0.1:{port}"
    policies = {
        wire: await Policy.connect_async(backend=wire, base_url=url, tokenizer=tokenizer) for wire in ("sglang", "vllm")
    }

    async def answer(request: Any) -> list[float]:
        policy = policies["vllm" if "vllm" in request["name"] else "sglang"]
        often: Any = "always" if "echo" in request["name"] else "first"
        return await timed(
            lambda: policy.model(sampling={"max_new_tokens": 300}, verify_echo=often),
            CONTEXTS[request["context"]],
            request["rollouts"],
        )

    await serve(answer)
    for policy in policies.values():
        await policy.backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
