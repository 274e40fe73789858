"""An adapter of the toy, as a child process runs it."""

import sys
from pathlib import Path

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from tito_conformance.gateway.child import in_loop, request

FACTS = {"name": "toy", "wires": ["vllm"], "variants": {"sound": {}, "usage missing": {"note": "has no usage"}}}
served = {}


async def serve(app):
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}"


def start(engine, wire, tokenizer, model, variant):
    from transformers import AutoTokenizer

    from gateway.toy import Toy

    print("what a gateway prints is no answer")
    toy = Toy(engine, AutoTokenizer.from_pretrained(tokenizer), "" if variant == "sound" else variant)
    in_loop(serve(toy.app()))


def session(name):
    if name == "broken":
        raise ValueError("no such session")
    return {"base_url": f"{served['url']}/sessions/{name}/v1", "api_key": "EMPTY"}


def export(name):
    found = request(f"{served['url']}/sessions/{name}/trajectories")["trajectories"]
    return [{"ids": each["token_ids"], "mask": each["loss_mask"], "logprobs": each["logprobs"]} for each in found]
