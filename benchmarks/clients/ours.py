"""Our turns at `Model.stream`, on both wires, without and with the prompt's echo."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from conversation import CONTEXTS, timed

from tito_core import Policy
from tito_core.engine import models


async def main(port: int, rollouts: dict[str, int], wires: list[str]) -> None:
    """Print the samples as JSON."""
    tokenizer = models.load_tokenizer("smollm2")
    samples: dict[str, Any] = {}
    for wire in wires:
        policy = await Policy.connect_async(backend=wire, base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)
        for name, echo in (("", "first"), ("_echo", "always")):
            key = f"ours{name}" if wire == "sglang" else f"ours_{wire}{name}"

            def make(echo: Any = echo, policy: Policy = policy) -> Any:
                return policy.model(sampling={"max_new_tokens": 300}, verify_echo=echo)

            await timed(make, CONTEXTS["2k"], 2)  # what is done once is done
            samples[key] = {at: await timed(make, CONTEXTS[at], n) for at, n in rollouts.items()}
        await policy.backend.aclose()
    print(json.dumps(samples))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(main(given["port"], given["rollouts"], given["wires"]))
