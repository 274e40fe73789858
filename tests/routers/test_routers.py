"""The engines' own routers before two scripted workers: what a rollout needs of them (docs/scaling.md)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from strands import Agent

from support.backends import soon
from support.routers import ROUTERS, WORKERS, routed
from support.scripted import Says, engine_of, tokenizer
from tito_conformance.testing import Fault, ScriptedEngine, ScriptedServer, always
from tito_core import Policy
from tito_core.backend import EngineAdmin, UnsupportedByServerError, create_backend
from tito_core.backend.generate import score
from tito_core.ledger import Ledger, check_ledger

pytestmark = pytest.mark.routers
ROLLOUTS, TURNS = 50, 3
ECHO_DROPPED = ("sglang-router",)
ABORTS = {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}


@dataclass
class Fleet:
    name: str
    url: str
    workers: Sequence[ScriptedServer]
    stacks: Sequence[ExitStack]
    """One for each worker; closing it stops the worker."""

    @property
    def kind(self) -> str:
        return WORKERS[self.name]

    @property
    def engines(self) -> Sequence[ScriptedEngine]:
        return [worker.engine for worker in self.workers]

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self.engines)

    async def connect(self) -> Policy:
        return await Policy.connect_async(
            backend=self.kind, base_url=self.url, tokenizer=tokenizer(), model_id="scripted", timeout_s=60
        )

    def sent(self, path: str) -> int:
        return sum(exchange.path == path for engine in self.engines for exchange in engine.exchanges)


@pytest.fixture(params=ROUTERS)
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    kind = WORKERS[request.param]
    with ExitStack() as stack:
        engines = [engine_of(kind, Says("One.", "Two.", "Three."), max_model_len=8192) for _ in range(2)]
        stacks = [stack.enter_context(ExitStack()) for _ in engines]
        workers = [own.enter_context(ScriptedServer(engine)) for own, engine in zip(stacks, engines, strict=True)]
        url = stack.enter_context(routed(request.param, [worker.base_url for worker in workers], tmp_path))
        yield Fleet(request.param, url, workers, stacks)


async def rollout(policy: Policy, turns: int = TURNS, **options: Any) -> Ledger:
    model = policy.model(**options)
    agent = Agent(model=model, callback_handler=None)
    for number in range(turns):
        await agent.invoke_async(f"Question {number}")
    ledger = model.reset()
    check_ledger(ledger)
    assert len(ledger) == turns
    return ledger


async def test_rollouts_scores_and_weights(fleet: Fleet) -> None:
    policy = await fleet.connect()
    ledgers = await asyncio.gather(*(rollout(policy, stream=number % 2 == 0) for number in range(ROLLOUTS)))
    served = [[request.request_id for request in engine.requests] for engine in fleet.engines]
    for ledger in ledgers:
        ids = {turn.draft.engine.request_id for turn in ledger}
        assert any(ids <= set(own) for own in served), "its turns meet one prefix cache"
        echoes = [turn.draft.engine.echoed_from for turn in ledger]
        begins = [0, *(turn.draft.prompt_length + len(turn.draft.columns.output_ids) - 1 for turn in [*ledger][:-1])]
        assert echoes == (begins if fleet.name in ECHO_DROPPED else [0] * TURNS), "and the whole prompt is proven"
    assert all(len(own) > ROLLOUTS // 2 for own in served), "both workers serve"

    ids = np.arange(1000, 1040, dtype=np.int32)
    alone = create_backend(fleet.kind, fleet.workers[0].base_url)
    assert np.array_equal(await score(policy.backend, ids), await score(alone, ids), equal_nan=True)

    for number, worker in enumerate(fleet.workers):  # a router takes no weights: each worker gets them at its address
        server: Any = create_backend(fleet.kind, worker.base_url)
        assert isinstance(server, EngineAdmin)
        await server.load_weights("/new", f"step-{number}", images_uncached=True)
        await server.aclose()
    ledgers = await asyncio.gather(*(rollout(policy) for _ in range(16)))
    versions = [{span.version for turn in ledger for span in turn.draft.engine.versions} for ledger in ledgers]
    assert {*map(tuple, versions)} == {("step-0",), ("step-1",)}, "and each answer says whose sampled it"
    await alone.aclose()
    await policy.backend.aclose()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_turn_ends_on_its_worker(
    fleet: Fleet, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By a closed connection, which routers hand on; most have no path for aborts."""
    policy = await fleet.connect()
    model = policy.model(stream=stream)
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async("Hi")
    for engine in fleet.engines:
        engine.fault = always(Fault(hang=True))
    turn = asyncio.ensure_future(agent.invoke_async("And then?"))
    assert await soon(lambda: fleet.running == 1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert await soon(lambda: fleet.running == 0)
    assert "could not be aborted" not in caplog.text
    assert len(model.ledger) == 1
    await policy.backend.aclose()
    assert bool(fleet.sent(ABORTS[fleet.kind])) is (fleet.name == "vllm-router")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_vanishes_leaves_nothing_running(fleet: Fleet, stream: bool) -> None:
    policy = await fleet.connect()
    ledger = await rollout(policy, turns=1, stream=stream)
    like = next(r for e in fleet.engines for r in e.requests if r.request_id == ledger[0].draft.engine.request_id)
    for engine in fleet.engines:
        engine.fault = always(Fault(hang=True))
    body = json.dumps({**like.body, "rid": "again"} if fleet.kind == "sglang" else like.body).encode()
    where = urlsplit(fleet.url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST {like.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    assert await soon(lambda: fleet.running == 1)
    writer.transport.abort()
    assert await soon(lambda: fleet.running == 0)
    await policy.backend.aclose()


async def test_a_worker_that_goes_away_loses_no_rollout(fleet: Fleet) -> None:
    policy = await fleet.connect()
    lost = asyncio.Event()

    async def one() -> Ledger:
        model = policy.model()
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("Hi")
        await lost.wait()
        await agent.invoke_async("And then?")
        check_ledger(model.ledger)
        return model.reset()

    running = [asyncio.ensure_future(one()) for _ in range(10)]
    assert await soon(lambda: sum(len(engine.requests) for engine in fleet.engines) >= 10)
    await asyncio.to_thread(fleet.stacks[0].close)
    lost.set()
    assert [len(ledger) for ledger in await asyncio.gather(*running)] == [2] * 10
    await policy.backend.aclose()


async def test_vllm_router_before_sglang_proves_no_prompt(tmp_path: Path) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(ScriptedServer(engine_of("sglang", Says("One.")))) for _ in range(2)]
        url = stack.enter_context(routed("vllm-router", [worker.base_url for worker in workers], tmp_path))
        with pytest.raises(UnsupportedByServerError, match="drops return_prompt_token_ids and logprob_start_len"):
            await Policy.connect_async(backend="sglang", base_url=url, tokenizer=tokenizer())
