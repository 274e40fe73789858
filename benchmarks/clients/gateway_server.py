"""The gateway and a bare proxy on ports of this process, whose CPU is asked for, and turns of `TITOModel` in it."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import Any

import aiohttp
from aiohttp import web

from conversation import CONTEXTS, serve, timed
from strands_tito import Policy
from strands_tito.gateway import Gateway
from tito_engines import models

SAMPLING: Any = {"max_new_tokens": 300}


async def main(port: str) -> None:
    """Answer {"what": "ports" | "cpu" | "model", "context": "2k"}."""
    tokenizer = models.load_tokenizer("smollm2")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)
    async with policy, aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            async with session.post(f"http://127.0.0.1:{port}/generate", data=body) as reply:
                return web.Response(body=await reply.read(), content_type="application/json")

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with Gateway(policy, sampling=SAMPLING, verify_echo="first") as gateway:

            async def answer(request: Any) -> Any:
                if request["what"] == "ports":
                    return [int(gateway.url.rpartition(":")[2]), runner.addresses[0][1]]
                if request["what"] == "cpu":
                    gc.collect(0)
                    return time.process_time() * 1e3
                make = lambda: policy.model(sampling=SAMPLING, verify_echo="first")  # noqa: E731  # as in ours.py
                return await timed(make, CONTEXTS[request["context"]], 1)

            await serve(answer)
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
