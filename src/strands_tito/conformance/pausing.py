"""A paused server answers nothing, and answers what waits once it resumes. Only where the weights may change, too."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from strands_tito.conformance.laws import Tally, set_place
from strands_tito.conformance.target import ConnectedServer, can_stream
from tito_core.backend import EngineAdmin
from tito_core.backend.calls import generate
from tito_core.backend.protocol import TokenChunk, TokenRequest

TOKENS = 8
"""Tokens of the answer that must wait."""
PAUSE_S = 1.0
"""How long the server stays paused; an answer that ignores the pause is complete by then, or at least begun."""
WAIT_S = 120.0
"""Seconds after which an answer that still did not come is lost."""


async def check(server: ConnectedServer, tally: Tally) -> None:
    """Pause, send a request, and resume."""
    backend = server.backend
    if not isinstance(backend, EngineAdmin) or not can_stream(backend):
        tally.skip("paused", f"The backend {server.target.backend} cannot pause.")
        return
    parameters = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    set_place(sampling=parameters, streamed=True)
    messages: list[Any] = [{"role": "user", "content": [{"text": "Wait for me."}]}]
    prompt = server.policy.template.first_prompt(messages, None, None).ids
    early: list[int] = []

    def count(chunk: TokenChunk) -> None:
        early.extend(chunk.output_ids.tolist())

    request = TokenRequest(prompt, server.sampling(**parameters), uuid.uuid4().hex)
    await backend.pause()
    try:
        answer = asyncio.create_task(generate(server.policy.backend, request, count))
        await asyncio.wait([answer], timeout=PAUSE_S)
        arrived = len(early)
    finally:
        await backend.resume()
    await asyncio.wait([answer], timeout=WAIT_S)
    if not answer.done():
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        tally.require("paused", False, f"a request waited for {WAIT_S:.0f} s after the server resumed.")
    tally.require("paused", not arrived, f"{arrived} tokens arrived while the server was paused.")
    whole = len((await answer).output_ids)
    tally.require("paused", whole == TOKENS, f"an answer that waited has {whole} tokens, not {TOKENS}.")
