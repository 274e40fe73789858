"""An abort ends the request that it names, and no other; the server scores what was sampled until then."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from typing import Any

import numpy as np

from strands_tito.conformance.laws import Tally, set_place
from strands_tito.conformance.target import ConnectedServer, can_stream
from tito_core.backend.calls import generate, score
from tito_core.backend.protocol import TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.semantics import semantics_of
from tito_core.ledger.turn import Finish

LATE = 48
"""Tokens that may come after an abort is confirmed: those of the steps in progress, and those in transfer."""
SOON = 0.2
"""Seconds within which the rest of an answer may come after its abort is confirmed: it was sampled before."""
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
    parameters = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    sampling = server.sampling(**parameters)
    set_place(sampling=parameters, streamed=True)
    names, counts, runs = [uuid.uuid4().hex for _ in range(2)], Counter[str](), [asyncio.Event() for _ in range(2)]

    async def one(name: str, begun: asyncio.Event) -> TokenResponse:
        def count(chunk: TokenChunk) -> None:
            counts[name] += len(chunk.output_ids)
            begun.set()

        return await generate(server.policy.backend, TokenRequest(prompt, sampling, name), count)

    tasks = [asyncio.ensure_future(one(name, begun)) for name, begun in zip(names, runs, strict=True)]
    waits = [asyncio.ensure_future(begun.wait()) for begun in runs]
    try:
        for wait, task in zip(waits, tasks, strict=True):
            await asyncio.wait([wait, task], return_when=asyncio.FIRST_COMPLETED)
        early = tasks[0].done()
        await server.policy.backend.abort(names[0])
        known = counts[names[0]]
        confirmed = time.monotonic()
        aborted = await tasks[0]
        took, other = time.monotonic() - confirmed, await tasks[1]
    finally:
        for each in (*waits, *tasks):
            each.cancel()
        await asyncio.gather(*waits, *tasks, return_exceptions=True)
    received = len(other.output_ids)
    problem = f"another request was aborted, and this one got {received} of {TOKENS} tokens."
    tally.require("aborted", received == TOKENS, problem, 0)
    sent = [] if server.log is None else [each.status for each in server.log.exchanges if "abort" in each.path]
    tally.require("aborted", early or server.log is None or bool(sent), "the client sent no abort.", 0)
    whole = len(aborted.output_ids) == TOKENS and took < SOON
    if sent and sent[-1] != 200:
        tally.skip("aborted", f"The server answered an abort with status {sent[-1]}.")
        return
    if early or whole:
        tally.skip("aborted", "The answer was complete before the abort, or within moments of it.")
        return
    ended = aborted.finish == Finish.ABORT and len(aborted.output_ids) < TOKENS
    problem = f"a request went on to {len(aborted.output_ids)} tokens ({aborted.finish}) although it was aborted."
    tally.require("aborted", ended, problem)
    late = len(aborted.output_ids) - known
    problem = f"{late} tokens of an aborted request arrived after its abort was confirmed, more than {LATE}."
    tally.require("aborted", late <= LATE, problem)
    if semantics_of(server.policy.info, sampling).comparable_with_scoring() and len(aborted.output_ids):
        scores = (await score(server.policy.backend, np.concatenate([prompt, aborted.output_ids])))[len(prompt) :]
        apart = float(np.max(np.abs(scores - aborted.logprobs)))
        problem = f"a token of an aborted answer is {apart:.4g} nats from the server's own score."
        tally.require("rescored", apart <= server.tolerance_nats, problem, len(scores))
