"""strands-vllm's turns at `Model.stream`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from conversation import CONTEXTS, timed
from strands_vllm import VLLMModel


async def main(port: int, rollouts: dict[str, int]) -> None:
    """Print the samples as JSON."""

    def make() -> Any:
        return VLLMModel(
            base_url=f"http://127.0.0.1:{port}/v1",
            model_id="canned",
            params={"max_tokens": 300},
            return_token_ids=True,
        )

    await timed(make, CONTEXTS["2k"], 1)
    print(json.dumps({"peer": {at: await timed(make, CONTEXTS[at], count) for at, count in rollouts.items()}}))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(given["port"], given["rollouts"]))
