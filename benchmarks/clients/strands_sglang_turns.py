"""strands-sglang's turns at `Model.stream`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from strands_sglang import SGLangClient, SGLangModel
from transformers import AutoTokenizer

from conversation import CONTEXTS, serve, timed


async def main(port: str, tokenizer: str) -> None:
    """Measure the requested case: {"context": "2k", "rollouts": 5}."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    client = SGLangClient(base_url=f"http://127.0.0.1:{port}")

    async def answer(request: Any) -> list[float]:
        return await timed(
            lambda: SGLangModel(client=client, tokenizer=loaded, sampling_params={"max_new_tokens": 300}),
            CONTEXTS[request["context"]],
            request["rollouts"],
        )

    await serve(answer)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
