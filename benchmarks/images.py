"""Client CPU of turns with a 512 x 512 picture, and the share of base64 in it.

    python benchmarks/images.py [--json] [--quick | --smallest]

The server is another process that answers at once, on SGLang's wire. Medians in milliseconds of `time.process_time`:

- `adds_ms`: a turn that adds a picture that was not seen before: it is decoded once to check it, stored and sent.
- `later_ms`: the next turn, of text: the stored picture is sent again.
- `text_ms`: a turn of text in a rollout without pictures.
- `base64_ms`: encoding the picture alone; both turns with it do this once.
- `megabytes`: size of the picture, a PNG of noise, which does not compress.
- `copies`: copies of the picture that ledger, history and caches hold after both turns.
"""

from __future__ import annotations

import asyncio
import gc
import io
import multiprocessing
import statistics
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from aiohttp import web
from bench import options, report
from PIL import Image as pillow
from rich.table import Table

from strands_tito import Policy, TITOModel
from tito_core.backend.images import data_url_json
from tito_engines import models

SIDE, TOKENS, PAD = 512, 256, 151655
OUTPUT = [*range(1000, 1049), 151645]


def serve(port: Connection) -> None:
    """Answer as a server that reads `TOKENS` tokens for each picture."""

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        if body["sampling_params"].get("logit_bias") or "rid" not in body:
            return web.json_response({"error": {"message": "keys in [0, 151935]"}}, status=400)
        count = len(body.get("image_data") or ())
        ids = [token for each in body["input_ids"] for token in [each] * (TOKENS if each == PAD and count else 1)]
        sampled = OUTPUT[: body["sampling_params"]["max_new_tokens"]]
        stopped = sampled[-1:] == OUTPUT[-1:]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": OUTPUT[-1]} if stopped else {"type": "length"},
            "prompt_tokens": len(ids),
            "completion_tokens": len(sampled),
            "output_token_logprobs": [[-1.0, token, None] for token in sampled],
            "input_token_logprobs": [[None if not at else -1.0, token, None] for at, token in enumerate(ids)],
            "image_tokens": count * TOKENS,
        }
        return web.json_response({"output_ids": sampled, "meta_info": meta, "prompt_token_ids": ids})

    async def known(request: web.Request) -> web.Response:
        served = [{"id": "m", "max_model_len": 200_000}]
        return web.json_response({"data": served, "has_image_understanding": True, "model_type": "qwen3_vl"})

    async def run() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", generate)
        app.router.add_get("/{path:.*}", known)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def picture(seed: int) -> bytes:
    """Return a PNG of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    out = io.BytesIO()
    pillow.fromarray(noise).save(out, "png")
    return out.getvalue()


async def turn(model: TITOModel, messages: list[Any], content: list[Any]) -> float:
    """Run a turn and return its CPU in milliseconds."""
    messages.append({"role": "user", "content": content})
    begin = time.process_time()
    text = ""
    async for event in model.stream(messages):
        found: Any = event
        text += found.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
    spent = (time.process_time() - begin) * 1000
    messages.append({"role": "assistant", "content": [{"text": text}]})
    return spent


def copies_of(data: bytes) -> int:
    """Count the distinct objects in memory that hold these bytes."""
    gc.collect()
    found = set()
    for holder in gc.get_objects():
        inside = gc.get_referents(holder) if not isinstance(holder, type) else ()
        found |= {id(value) for value in inside if type(value) is bytes and len(value) >= len(data) and data in value}
    return len(found)


async def measure(port: int, rounds: int) -> dict[str, float]:
    """Run rollouts of two turns each."""
    tokenizer = models.load_tokenizer("qwen3-vl-tiny")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)
    samples: dict[str, list[float]] = {"adds": [], "later": [], "text": [], "base64": []}
    held = 0
    for number in range(rounds + 2):
        data = picture(number)
        model, plain = policy.model(), policy.model()
        block = {"image": {"format": "png", "source": {"bytes": data}}}
        messages: list[Any] = []
        other: list[Any] = []
        await turn(model, messages, [{"text": "Hello."}])
        await turn(plain, other, [{"text": "Hello."}])
        times = {
            "adds": await turn(model, messages, [block, {"text": "What is this?"}]),
            "later": await turn(model, messages, [{"text": "And now?"}]),
            "text": await turn(plain, other, [{"text": "And now?"}]),
        }
        [image] = model.ledger.images.values()
        begin = time.process_time()
        data_url_json(image)
        times["base64"] = (time.process_time() - begin) * 1000
        held = max(held, copies_of(data))
        for name, spent in times.items() if number > 1 else ():
            samples[name].append(spent)
    medians = {f"{name}_ms": round(statistics.median(values), 3) for name, values in samples.items()}
    return {**medians, "megabytes": round(len(data) / 1e6, 3), "copies": held}


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        results = asyncio.run(measure(ours.recv(), (20, 5, 1)[arguments.size]))
    finally:
        with suppress(ProcessLookupError):
            server.terminate()
    table = Table("what", "value", title="A turn with a picture")
    for name, value in results.items():
        table.add_row(name, str(value))
    report(arguments, results, table)


if __name__ == "__main__":
    main()
