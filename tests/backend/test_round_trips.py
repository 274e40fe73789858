"""Connecting takes few round trips and repeats every measurement."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from support.backends import EOS, WIRES, Kind, backend_of, engine_of
from support.scripted import tokenizer
from tito_conformance.testing import HashPolicy, InProcessTransport, ScriptedEngine
from tito_core import Policy
from tito_core.backend.http.client import HttpResponse
from tito_core.backend.id_text import Pieces
from tito_core.policy import run_blocking

STEPS = 200
"""Steps of the event loop that a request takes; what is sent together takes a few to get on its way."""


class Distant(InProcessTransport):
    """A server that is so many steps away, and counts how many requests waited for each other.

    Attributes:
        rounds: The round of each request: one more than the highest of those that were answered when it was sent.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.rounds: list[int] = []
        self._answered = 0

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        number = self._answered + 1
        self.rounds.append(number)
        for _ in range(STEPS):
            await asyncio.sleep(0)
        reply = await super().send(method, url, headers, body)
        self._answered = max(self._answered, number)
        return reply


@pytest.mark.parametrize(("kind", "rounds"), [("vllm", 6), ("vllm-completions", 6), ("sglang", 5)])
def test_connecting_takes_few_round_trips(kind: Kind, rounds: int) -> None:
    size = len(tokenizer())
    there = Distant(engine_of(kind, HashPolicy(size, eos_ids=[EOS]), vocab_size=size))
    backend = backend_of(there.engine, http_transport=lambda: there)
    policy = run_blocking(Policy.connect_async(backend=backend, tokenizer=tokenizer()))
    assert policy.info.processed_logprobs is not None
    print(f"{kind}: {len(there.rounds)} requests in {max(there.rounds)} rounds")
    assert max(there.rounds) == rounds


@pytest.mark.parametrize("kind", WIRES)
def test_a_server_restarted_with_other_options_is_measured_again(kind: Kind) -> None:
    size = len(tokenizer())
    raw, processed = (
        engine_of(kind, HashPolicy(size, eos_ids=[EOS]), vocab_size=size, raw_logprobs=raw) for raw in (True, False)
    )
    there = InProcessTransport(raw)
    backend = backend_of(raw, http_transport=lambda: there)
    for engine, processes in ((raw, False), (processed, True), (raw, False)):
        there.engine = engine
        policy = run_blocking(Policy.connect_async(backend=backend, tokenizer=tokenizer()))
        assert policy.info.processed_logprobs is processes
