"""strands-sglang's rollouts at once."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from strands_sglang import SGLangClient, SGLangModel
from transformers import AutoTokenizer

from conversation import CONTEXTS, opening, serve, turn
from crowd import SPECS, Seeded, crowd


async def main(port: str, tokenizer: str) -> None:
    """Answer {"way": "agent" | "stream", "context": "2k", "rollouts": 1000, "turns": 5}."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    client = SGLangClient(base_url=f"http://127.0.0.1:{port}")

    def fresh() -> Any:
        return SGLangModel(client=client, tokenizer=loaded, sampling_params={"max_new_tokens": 300})

    async def answer(request: Any) -> Any:
        first, messages = fresh(), opening(CONTEXTS[request["context"]])
        await turn(first, messages, SPECS)

        def seeded() -> Seeded:
            model = fresh()
            for name in ("token_ids", "loss_mask", "logprobs", "segment_info"):
                setattr(model.rollout, name, list(getattr(first.rollout, name)))
            model.processed_messages = first.processed_messages
            return model, messages

        return await crowd(seeded, request["way"], request["rollouts"], request["turns"])

    await serve(answer)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
