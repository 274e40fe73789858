"""strands-sglang's turns at `Model.stream`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from conversation import CONTEXTS, timed
from strands_sglang import SGLangClient, SGLangModel
from transformers import AutoTokenizer


async def main(port: int, tokenizer: str, rollouts: dict[str, int]) -> None:
    """Print the samples as JSON."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    client = SGLangClient(base_url=f"http://127.0.0.1:{port}")

    def make() -> Any:
        return SGLangModel(client=client, tokenizer=loaded, sampling_params={"max_new_tokens": 300})

    await timed(make, CONTEXTS["2k"], 2)
    samples = {at: await timed(make, CONTEXTS[at], count) for at, count in rollouts.items()}
    await client.close()
    print(json.dumps({"peer": samples}))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(given["port"], given["tokenizer"], given["rollouts"]))
