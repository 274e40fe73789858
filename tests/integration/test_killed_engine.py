"""A real server is killed during a rollout: a clear error, an unchanged ledger, and the next run works."""

from __future__ import annotations

import asyncio
import contextlib

import psutil
import pytest
from strands.types.exceptions import MaxTokensReachedException

import tito_engines as engines
from calculator import make_agent
from support.keeping import ENGINES
from support.real import policy_at
from tito_core import store
from tito_core.backend import EngineConnectionError
from tito_core.ledger import check_ledger
from tito_engines import RunningEngine

pytestmark = [pytest.mark.engine, pytest.mark.long]  # tests/model kills scripted servers


def kill(server: RunningEngine) -> None:
    """Kill the server and its children at once, as an out-of-memory killer would."""
    for process in reversed([psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]):
        with contextlib.suppress(psutil.NoSuchProcess):  # its supervisor may kill it first
            process.kill()


@pytest.mark.parametrize("kind", ENGINES)
async def test_a_killed_engine_raises_and_a_restarted_one_is_used_again(kind: str) -> None:
    server = await asyncio.to_thread(engines.bring_up, kind, model="smollm2")
    try:
        policy = await policy_at(kind, server.url, patience_s=5)
        model = policy.model(sampling={"temperature": 0.0, "max_new_tokens": 64})
        agent = make_agent(model)
        with contextlib.suppress(MaxTokensReachedException):
            await agent.invoke_async("What is 25 * 17?", limits={"turns": 3})
        assert len(model.ledger) >= 1
        before = store.encode(model.ledger)

        model.update_config(max_new_tokens=1500, ignore_eos=True)
        rollout = asyncio.ensure_future(agent.invoke_async("Write a very long story about numbers."))
        await asyncio.sleep(1.5)
        assert not rollout.done()
        kill(server)
        with pytest.raises(EngineConnectionError, match=f"{kind} at "):
            await rollout
        assert store.encode(model.ledger) == before
    finally:
        await asyncio.to_thread(engines.stop, server)

    port = int(server.url.rsplit(":", 1)[1])
    async with engines.running(kind, model="smollm2", port=port):
        model.update_config(max_new_tokens=32, ignore_eos=False)
        turns = len(model.ledger)
        with contextlib.suppress(MaxTokensReachedException):
            await agent.invoke_async("Hi again.", limits={"turns": 2})
        assert len(model.ledger) > turns
        check_ledger(model.ledger)
