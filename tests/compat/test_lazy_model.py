"""A model that connects at its first turn, and is otherwise a `TITOModel`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from strands import Agent

from support.names import client_of, named
from support.scripted import BACKENDS, Says, engine_of, model_of, tokenizer
from tito_compat.model import SharedPolicies
from tito_core.backend.errors import EngineConnectionError, UnsupportedByServerError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.ledger import check_ledger
from tito_sglang import SGLangClient, SGLangModel
from tito_vllm import VLLMModel

by_kind = pytest.mark.parametrize("kind", BACKENDS)
MESSAGES: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]


@by_kind
async def test_a_model_connects_at_the_first_turn_and_not_before(kind: str) -> None:
    model = named(kind, Says("Five."), context_window_limit=10**6)
    assert (len(model.rollout), model.rollouts, model.tool_parse_errors, len(model.reset())) == (0, [], {}, 0)
    agent = Agent(model=model, callback_handler=None)
    assert (model.context_window_limit, model.get_config()["sampling"]["temperature"]) == (10**6, 1.0)
    with pytest.raises(AttributeError, match="has no attribute 'polcy'"):
        _ = model.polcy
    assert not model.is_connected
    await agent.invoke_async("2 + 3?")
    assert model.is_connected
    assert model.context_window_limit == model.policy.info.max_model_len
    assert model.get_config()["backend"] == kind


@by_kind
async def test_reading_an_attribute_of_a_connected_model_connects(kind: str) -> None:
    counted = await named(kind, Says("Five.")).count_tokens(MESSAGES)
    for read in (lambda m: m.certificate.passed, lambda m: m.ledger.uuid, lambda m: m.policy.info):
        model = named(kind, Says("Five."))
        assert read(model)
        assert model.is_connected
    assert counted == await model_of(kind, Says("Five.")).count_tokens(MESSAGES)


@by_kind
async def test_its_turns_are_those_of_a_tito_model(kind: str) -> None:
    answers = ("Five.", "Yes.")
    models = (named(kind, Says(*answers)), model_of(kind, Says(*answers)))
    for model in models:
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("2 + 3?")
        await agent.invoke_async("Sure?")
        check_ledger(model.ledger)
    columns = [[turn.draft.columns.buffer for turn in model.ledger] for model in models]
    assert columns[0] == columns[1]


async def test_models_of_one_client_share_one_policy_and_one_connect() -> None:
    engine = engine_of("sglang", Says("Five."))
    client = client_of(engine)
    models = [SGLangModel(tokenizer(), client=client) for _ in range(4)]
    assert engine.exchanges == []
    await asyncio.gather(*(model.connected() for model in models))
    assert len({id(model.policy) for model in models}) == 1
    assert [exchange.path for exchange in engine.exchanges].count("/v1/models") == 1
    other = SGLangModel(tokenizer(), client=client, enable_thinking=False)
    assert await other.connected() is not models[0].policy


def test_one_model_is_used_from_threads_with_loops_of_their_own() -> None:
    model = named("sglang", Says("Five."))
    agents = [Agent(model=model, callback_handler=None) for _ in range(3)]
    threads = [threading.Thread(target=agent, args=("2 + 3?",)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent in agents:
        agent("And now?")
    assert len(model.ledger) == 6
    assert len(model.rollouts) == 3, "one per agent, although the conversations are equal"


async def test_what_cannot_connect_fails_at_the_first_turn(tmp_path: Path) -> None:
    failing = [
        (SGLangModel(tokenizer(), client=SGLangClient("http://127.0.0.1:9", patience_s=0)), EngineConnectionError),
        (VLLMModel(base_url="http://127.0.0.1:9", model_id=str(tmp_path / "none")), TokenizerError),
        (named("sglang", Says("Five."), optional_outputs={"routed_experts": (3, 2)}), UnsupportedByServerError),
    ]
    for model, error in failing:
        for _ in range(2):
            with pytest.raises(error):
                await Agent(model=model, callback_handler=None).invoke_async("Hello?")
        assert not model.is_connected


def test_a_failed_connection_is_not_cached() -> None:
    shared, failures = SharedPolicies(), []

    def fail() -> Any:
        failures.append(1)
        raise RuntimeError("no server")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no server"):
            shared.get("key", fail)
    policy: Any = object()
    assert shared.get("key", lambda: policy) is policy
    assert shared.get("key", fail) is policy
    assert len(failures) == 2
