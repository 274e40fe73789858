"""A turn that is lost, whichever way, leaves no trace (law 5): not in the ledger, and not on the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from strands import Agent
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

from support.scripted import BACKENDS, Says, engine_of, is_probe, model_of, tokenizer
from tito_core import TITOModel, store
from tito_core.backend import EngineConnectionError, EngineTimeoutError, ProtocolViolationError
from tito_core.testing import THROTTLED, Fault, ScriptedServer, always, at

HELLO: Any = [{"role": "user", "content": [{"text": "Hello?"}]}]


def shifted_logprob(answer: dict[str, Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
    else:
        answer["meta_info"]["output_token_logprobs"][0][0] = None


def snapshot(model: TITOModel) -> bytes:
    return store.encode(model.ledger)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_missing_logprob_is_an_error_and_the_next_run_is_fine(kind: str) -> None:
    model = model_of(kind, Says("One.", "Two."), fault=at({1: Fault(edit=shifted_logprob)}))
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async("Hello?")
    before = snapshot(model)
    with pytest.raises(ProtocolViolationError, match="output token 0 has no logprob"):
        await agent.invoke_async("And?")
    assert snapshot(model) == before
    await agent.invoke_async("And now?")
    assert [turn.parent for turn in model.ledger] == [None, 0]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_consumer_that_stops_early_leaves_no_trace(kind: str) -> None:
    model = model_of(kind, Says("One."))
    events = 0
    async for _ in model.stream(HELLO):
        events += 1
    assert len(model.ledger) == 1
    for stop_after in range(events):
        other = model_of(kind, Says("One."))
        stream = other.stream(HELLO)
        for _ in range(stop_after):
            await anext(stream)
        await stream.aclose()
        assert len(other.ledger) == 0, stop_after


@pytest.mark.parametrize("kind", BACKENDS)
async def test_cancelling_the_task_aborts_on_the_engine(kind: str) -> None:
    with ScriptedServer(engine_of(kind, Says("One."), fault=_hang_the_agents_turn)) as server:
        model = _model_at(server.base_url, kind)
        task = asyncio.ensure_future(Agent(model=model, callback_handler=None).invoke_async("Hello?"))
        await _until(lambda: server.engine.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: server.engine.running == 0)
        assert len(model.ledger) == 0


@pytest.mark.parametrize("kind", BACKENDS)
async def test_the_agents_own_cancel_aborts_on_the_engine(kind: str) -> None:
    with ScriptedServer(engine_of(kind, Says("One."), fault=_hang_the_agents_turn)) as server:
        model = _model_at(server.base_url, kind)
        agent = Agent(model=model, callback_handler=None)
        task = asyncio.ensure_future(agent.invoke_async("Hello?"))
        await _until(lambda: server.engine.running == 1)
        agent.cancel()
        result = await asyncio.wait_for(task, 5)
        assert result.stop_reason == "cancelled"
        await _until(lambda: server.engine.running == 0)
        assert len(model.ledger) == 0


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_timeout_is_named_and_aborted(kind: str) -> None:
    with ScriptedServer(engine_of(kind, Says("One."), fault=_hang_the_agents_turn)) as server:
        model = _model_at(server.base_url, kind, timeout_s=0.5)
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match=r"did not answer within 0\.5 s"):
            await Agent(model=model, callback_handler=None).invoke_async("Hello?")
        assert time.monotonic() - started < 5
        await _until(lambda: server.engine.running == 0)
        assert len(model.ledger) == 0


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_engine_that_dies_in_mid_rollout_is_named_and_its_return_is_welcome(kind: str) -> None:
    server = ScriptedServer(engine_of(kind, Says("One.", "Two.")))
    with server:
        model = _model_at(server.base_url, kind, max_attempts=2)
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("Hello?")
        before = snapshot(model)
    with pytest.raises(EngineConnectionError, match="Is the server running"):
        await agent.invoke_async("Still there?")
    assert snapshot(model) == before
    with ScriptedServer(engine_of(kind, Says("Back.")), port=int(server.base_url.rsplit(":", 1)[1])):
        await agent.invoke_async("And now?")
    assert [turn.parent for turn in model.ledger] == [None, 0]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_overloaded_engine_becomes_strands_throttling(kind: str) -> None:
    model = model_of(kind, Says("One."), fault=always(THROTTLED))
    with pytest.raises(ModelThrottledException, match="overloaded"):
        async for _ in model.stream(HELLO):
            pass
    assert len(model.ledger) == 0


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_history_that_does_not_fit_becomes_strands_overflow_before_it_is_sent(kind: str) -> None:
    model = model_of(kind, Says("One."), max_model_len=40)
    sent = len(model.scripted.requests)  # type: ignore[attr-defined]
    with pytest.raises(ContextWindowOverflowException, match="leaves no room"):
        async for _ in model.stream([{"role": "user", "content": [{"text": "word " * 60}]}]):
            pass
    assert len(model.scripted.requests) == sent  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", BACKENDS)
def test_threads_share_a_model(kind: str) -> None:
    model = model_of(kind, Says("Same."))

    def work(number: int) -> None:
        agent = Agent(model=model, callback_handler=None)
        for turn in range(3):
            agent(f"{number}-{turn}?")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(trajectory.turns) for trajectory in model.trajectories) == [3] * 6


def _hang_the_agents_turn(number: int, request: Any) -> Fault | None:
    return None if is_probe(request) or request.max_new_tokens <= 1 else Fault(hang=True)


def _model_at(url: str, kind: str, **options: Any) -> TITOModel:
    return TITOModel(backend=kind, base_url=url, tokenizer=tokenizer(), **options)


async def _until(condition: Any) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "the engine still runs a request that nobody waits for"
        await asyncio.sleep(0.01)
