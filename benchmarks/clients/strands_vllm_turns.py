"""strands-vllm's turns at `Model.stream`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from strands_vllm import VLLMModel

from conversation import CONTEXTS, serve, timed


async def main(port: str) -> None:
    """Measure the requested case: {"context": "2k", "rollouts": 5}."""
    url, params = f"http://127.0.0.1:{port}/v1", {"max_tokens": 300}

    async def answer(request: Any) -> list[float]:
        return await timed(
            lambda: VLLMModel(base_url=url, model_id="canned", params=dict(params), return_token_ids=True),
            CONTEXTS[request["context"]],
            request["rollouts"],
        )

    await serve(answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
