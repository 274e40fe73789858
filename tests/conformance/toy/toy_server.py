"""The toy server: the policy of the scripted engines behind its own API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from conformance.defects.scripted_policy import ConformancePolicy
from tito_conformance import target
from tito_conformance.testing import ScriptedRequest
from tito_conformance.testing.script import reported_top, settle

LENGTH = 4096


class ToyServer:
    """Answers from a policy. `lie` changes an answer before it is sent."""

    def __init__(self, tokenizer: Any, end: int, *, lie: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._tokenizer = tokenizer
        self._policy = ConformancePolicy(tokenizer, end)
        self._end = end
        self._lie = lie
        self._number = 0

    async def about(self, request: web.Request) -> web.Response:
        about = {"model": "toy", "length": LENGTH, "vocabulary": len(self._tokenizer), "most_top": target.TOP}
        return web.json_response(about)

    async def sample(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self._number += 1
        generation = ScriptedRequest(
            tuple(fields["ids"]),
            fields["max_new_tokens"],
            fields["temperature"],
            fields["top_p"],
            max(fields["top_k"], 0),
            fields["min_p"],
            fields["seed"],
            tuple(fields["stop_token_ids"]),
            tuple(fields["stop"]),
            (self._end,),
            fields["ignore_eos"],
            fields["min_new_tokens"],
            vocab_size=len(self._tokenizer),
            number=self._number,
            body=fields,
        )
        done = settle(self._policy, generation, lambda ids: str(self._tokenizer.decode(list(ids))))
        answer = {
            "id": fields["id"],
            "ids": list(done.output_ids),
            "logprobs": list(done.logprobs),
            "why": done.finish,
            "stop": done.stop,
            "read": fields["ids"],
            "prompt_tokens": len(fields["ids"]),
            "completion_tokens": len(done.output_ids),
            "top": None,
        }
        if fields["top"]:
            whole, first = generation.whole(done.output_ids), len(fields["ids"])
            places = range(first, len(whole))
            answer["top"] = [reported_top(done.scorer, generation, whole, at, fields["top"]) for at in places]
        if self._lie is not None:
            self._lie(answer)
        return web.json_response(answer)

    async def tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["text"]
        return web.json_response({"ids": self._tokenizer.encode(text, add_special_tokens=False)})

    async def score(self, request: web.Request) -> web.Response:
        ids = (await request.json())["ids"]
        return web.json_response({"logprobs": self._policy.score(ids, 1, 1.0)})


@contextmanager
def serving(server: ToyServer) -> Iterator[str]:
    """Serve on loopback from a thread, and yield the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    app = web.Application()
    app.add_routes(
        [
            web.get("/about", server.about),
            web.post("/sample", server.sample),
            web.post("/tokenize", server.tokenize),
            web.post("/score", server.score),
        ]
    )
    runner = web.AppRunner(app, access_log=None)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port: int = runner.addresses[0][1]
        return port

    port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
