"""The engines' own routers before two real servers: proofs, the prefix cache, scores, versions, and what ends a turn.

What needs many rollouts, or a worker that dies, is in `tests/routers`, before scripted servers.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

import tito_engines as engines
from support.real import policy_at
from support.routers import WORKERS, routed
from tito_core import Policy
from tito_core.backend import create_backend
from tito_core.backend.generate import score
from tito_core.ledger import Ledger, check_ledger
from tito_engines import install, models

pytestmark = pytest.mark.engine
MODEL = "qwen3-tiny"
NATS = 1e-4


@dataclass(frozen=True)
class Fleet:
    name: str
    kind: str
    url: str
    workers: Sequence[str]

    async def until_running(self, count: int) -> None:
        while sum([await asyncio.to_thread(_running, self.kind, url) for url in self.workers]) != count:
            await asyncio.sleep(0.1)


def _running(kind: str, url: str) -> int:
    """Return how many generations a server runs, as it says itself."""
    path = "/metrics" if kind == "vllm" else "/v1/loads"
    with urllib.request.urlopen(url + path, timeout=30) as answer:
        text = answer.read().decode()
    if kind == "vllm":
        return sum(int(float(n)) for n in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE))
    return sum(load["num_running_reqs"] for load in json.loads(text)["loads"])


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[[str], list[str]]]:
    """Two servers of an engine, which its routers share."""
    up: dict[str, list[str]] = {}
    with ExitStack() as stack:

        def serve(kind: str) -> list[str]:
            if kind not in up:
                up[kind] = [
                    stack.enter_context(engines.running_sync(kind, model=MODEL, dev_mode=True)) for _ in range(2)
                ]
            return up[kind]

        yield serve


@pytest.fixture(params=[pytest.param(name, id=f"{kind}-{name}") for name, kind in WORKERS.items()])
def fleet(request: pytest.FixtureRequest, pair: Callable[[str], list[str]], tmp_path: Path) -> Iterator[Fleet]:
    kind = WORKERS[request.param]
    workers = pair(kind)
    with routed(request.param, workers, tmp_path) as url:
        yield Fleet(request.param, kind, url, workers)


async def rollout(policy: Policy, turns: int, **options: Any) -> Ledger:
    model = policy.model(sampling={"max_new_tokens": 16}, **options)
    agent = Agent(model=model, callback_handler=None)
    for number in range(turns):
        with suppress(MaxTokensReachedException):
            await agent.invoke_async(f"What is {number} * 17?")
    ledger = model.reset()
    check_ledger(ledger)
    assert len(ledger) == turns
    return ledger


async def test_rollouts_through_a_router(fleet: Fleet) -> None:
    policy = await policy_at(fleet.kind, fleet.url, MODEL)
    ledgers = await asyncio.gather(*(rollout(policy, 3, stream=number % 2 == 0) for number in range(6)))
    for ledger in ledgers:
        turns = [turn.draft for turn in ledger]
        begins = [0, *(turn.prompt_length + len(turn.columns.output_ids) - 1 for turn in turns[:-1])]
        echoes = begins if fleet.name == "sglang-router" else [0, 0, 0]
        assert [turn.engine.echoed_from for turn in turns] == echoes, "law 4 is proven by ids, whatever a router drops"
        if fleet.kind == "sglang":  # vLLM does not report it
            cached = [turn.engine.cached_tokens for turn in turns]
            assert cached[1:] == begins[1:], "one cache, which the proof leaves as it was"
    ids, alone = policy.probe_ids(), create_backend(fleet.kind, fleet.workers[0], timeout_s=120)
    assert np.nanmax(np.abs(await score(policy.backend, ids) - await score(alone, ids))) < NATS
    print(f"\n{fleet.name}: max_model_len={policy.info.max_model_len}, vocabulary {policy.vocabulary}")

    weights = models.ensure(MODEL, install.ensure(engines.find(fleet.kind)).python)
    await alone.load_weights(str(weights), fleet.name)  # type: ignore[attr-defined]
    await alone.aclose()
    ledgers = await asyncio.gather(*(rollout(policy, 1) for _ in range(16)))
    versions = [span.version for ledger in ledgers for span in ledger[0].draft.engine.versions]
    if fleet.kind == "sglang" or None not in versions:  # vLLM needs --enable-scale-out to name them
        assert len(set(versions)) == 2, "each answer says whose weights sampled it"
        assert fleet.name in versions
    await policy.backend.aclose()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_cancelled_turn_ends_on_its_server(fleet: Fleet, stream: bool) -> None:
    """By its closed connection: SGLang looks for one each 4 s, or at once where it streams."""
    policy = await policy_at(fleet.kind, fleet.url, MODEL)
    model = policy.model(stream=stream, sampling={"max_new_tokens": 3000, "ignore_eos": True})
    turn = asyncio.ensure_future(Agent(model=model, callback_handler=None).invoke_async("Count."))
    await fleet.until_running(1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await fleet.until_running(0)
    assert len(model.ledger) == 0
    await policy.backend.aclose()
