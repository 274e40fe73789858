"""Client CPU of one turn, by context length: prepare, send, check, parse, commit, over an in-process scripted engine.

    python benchmarks/turn.py [--json] [--quick]

The engine's own work is measured apart (the same request posted as ready-made bytes) and shown as the floor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from tito_core import Policy
from tito_core.engine import models
from tito_core.testing import Completion, InProcessTransport, ScriptedRequest, scripted_engine
from tito_sglang.backend import SGLangBackend
from tito_vllm.backend import VLLMBackend

SAMPLED = 300
CONTEXTS = {"2k": 2_000, "32k": 32_000, "128k": 128_000}
QUESTION: Any = {"role": "user", "content": [{"text": "And then?"}]}


def answer(request: ScriptedRequest) -> Completion:
    """Say 300 ordinary tokens."""
    n = min(SAMPLED, request.max_new_tokens)
    return Completion(np.random.default_rng(request.number).integers(300, 40_000, n).tolist(), finish="length")


async def measure(kind: str, length: int, repeats: int) -> tuple[list[float], list[float]]:
    """Give CPU milliseconds of our turns and of the floor's."""
    tokenizer = models.load_tokenizer("smollm2")
    engine = scripted_engine(kind, answer, vocab_size=len(tokenizer), max_model_len=200_000)
    backend_class = VLLMBackend if kind == "vllm" else SGLangBackend
    backend = backend_class("http://scripted", http_transport=lambda: InProcessTransport(engine))
    policy = await Policy.connect_async(backend=backend, tokenizer=tokenizer)
    history: Any = [{"role": "user", "content": [{"text": "word " * length}]}]
    ours, floor = [], []
    for _ in range(repeats):
        model = policy.model(sampling={"max_new_tokens": SAMPLED})
        messages = list(history)
        messages.append({"role": "assistant", "content": await _answer(model, messages)})
        messages.append(QUESTION)
        started = time.process_time()
        async for _event in model.stream(messages):
            pass
        ours.append((time.process_time() - started) * 1e3)
        assert [turn.parent for turn in model.ledger] == [None, 0]
        floor.append(await _floor(engine))
    return ours, floor


async def _answer(model: Any, messages: Any) -> list[Any]:
    text = ""
    async for event in model.stream(messages):
        text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
    return [{"text": text}]


async def _floor(engine: Any) -> float:
    """Post the last request's bytes again and read the answer, with nothing of ours."""
    last = [exchange for exchange in engine.exchanges if exchange.method == "POST"][-1]
    async with httpx.AsyncClient(transport=InProcessTransport(engine)) as client:
        body = last.body if isinstance(last.body, bytes) else json.dumps(last.body).encode()
        started = time.process_time()
        response = await client.post("http://scripted" + last.path, content=body)
        response.raise_for_status()
        return (time.process_time() - started) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 15
    table = Table("backend", "context", "turn ms", "floor ms", "ours alone ms", title="CPU of one turn, median")
    results: dict[str, Any] = {}
    for kind in ("vllm", "sglang"):
        for name, length in CONTEXTS.items():
            ours, floor = asyncio.run(measure(kind, length, repeats))
            turn, base = statistics.median(ours), statistics.median(floor)
            results[f"{kind}_{name}"] = {
                "turn_ms": turn,
                "floor_ms": base,
                "turn_samples": ours,
                "floor_samples": floor,
            }
            table.add_row(kind, name, f"{turn:.2f}", f"{base:.2f}", f"{turn - base:.2f}")
    if arguments.json:
        print(json.dumps(results))
    else:
        Console().print(table)


if __name__ == "__main__":
    main()
