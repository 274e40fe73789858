"""An abort ends the request that it names, and no other."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from strands_tito.conformance.laws import Tally
from strands_tito.conformance.target import ConnectedServer, can_stream
from tito_core.backend.calls import generate
from tito_core.backend.protocol import TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.turn import Finish

TOKENS = 180
"""Tokens of each answer, enough for an abort to arrive before the last one."""


async def check(server: ConnectedServer, tally: Tally) -> None:
    """Start two streams, abort the first after its first token, and wait for both."""
    if not can_stream(server.backend):
        tally.skip("aborted", "The backend does not stream, so the start of a request is unknown.")
        return
    limit = server.policy.info.max_model_len
    messages: list[Any] = [{"role": "user", "content": [{"text": "Count for ever."}]}]
    prompt = server.policy.template.first_prompt(messages, None, None).ids
    if limit is not None and len(prompt) + TOKENS > limit:
        tally.skip("aborted", f"An answer of {TOKENS} tokens does not fit into the context of {limit}.")
        return
    sampling = server.policy.sampling(SamplingParams(max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True))
    names, runs = [uuid.uuid4().hex for _ in range(2)], [asyncio.Event() for _ in range(2)]

    async def one(name: str, begun: asyncio.Event) -> TokenResponse:
        return await generate(server.policy.backend, TokenRequest(prompt, sampling, name), lambda _: begun.set())

    tasks = [asyncio.ensure_future(one(name, begun)) for name, begun in zip(names, runs, strict=True)]
    waits = [asyncio.ensure_future(begun.wait()) for begun in runs]
    try:
        for wait, task in zip(waits, tasks, strict=True):
            await asyncio.wait([wait, task], return_when=asyncio.FIRST_COMPLETED)
        early = tasks[0].done()
        await server.policy.backend.abort(names[0])
        aborted, other = await asyncio.gather(*tasks)
    finally:
        for each in (*waits, *tasks):
            each.cancel()
        await asyncio.gather(*waits, *tasks, return_exceptions=True)
    came = len(other.output_ids)
    tally.require(
        "aborted", came == TOKENS, f"another request was aborted, and {came} of {TOKENS} tokens came of this one."
    )
    if early or not _accepted(server):
        tally.skip("aborted", "The server cannot abort a request, or had already answered.")
        return
    ended = aborted.finish == Finish.ABORT and len(aborted.output_ids) < TOKENS
    problem = f"a request went on to {len(aborted.output_ids)} tokens ({aborted.finish}) although it was aborted."
    tally.require("aborted", ended, problem)


def _accepted(server: ConnectedServer) -> bool:
    """Return whether the server accepted an abort; True if its wire is not logged."""
    if server.log is None:
        return True
    answers = [exchange.status for exchange in server.log.exchanges if "abort" in exchange.path]
    return bool(answers) and answers[-1] == 200
