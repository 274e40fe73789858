"""Agents on real servers; re-scoring confirms the ledger."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from strands.types.exceptions import MaxTokensReachedException

from calculator import QUESTIONS, make_agent
from strands_tito.inspect.verify import Rescored, merge, rescore
from support.keeping import ONCE
from support.real import Served
from tito_core import TITOModel
from tito_core.backend import BadRequestError
from tito_core.backend.generate import generate
from tito_core.backend.protocol import TokenRequest
from tito_core.ledger import Ledger, check_ledger

pytestmark = pytest.mark.engine


async def roll_out(model: TITOModel, question: str) -> Ledger:
    agent = make_agent(model)
    try:
        await agent.invoke_async(question, limits={"turns": 4})
        await agent.invoke_async("Are you sure?", limits={"turns": 2})
    except MaxTokensReachedException:
        pass
    return model.ledger


async def confirmed(served: Served, questions: list[str], **sampling: float) -> Rescored:
    models = [served.model(max_new_tokens=96, **sampling) for _ in questions]
    ledgers = await asyncio.gather(*map(roll_out, models, questions))
    for ledger in ledgers:
        check_ledger(ledger)
        assert len(ledger) >= 1
    rescored = merge([await rescore(ledger, served.policy.backend) for ledger in ledgers])
    print(f"\n{served.kind} {sampling}: {len(rescored.differences)} tokens, max {rescored.quantile(1):.2e} nats")
    return rescored


async def test_rescoring_confirms_greedy_sampling(served: Served) -> None:
    rescored = await confirmed(served, QUESTIONS[:4], temperature=0.0)
    assert rescored.not_comparable == 0
    assert len(rescored.differences) >= 40
    assert rescored.quantile(1) <= 1e-4


@pytest.mark.parametrize("served", ONCE, indirect=True)  # the suite scores again on both engines
async def test_rescoring_confirms_sampling_at_temperature_one(served: Served) -> None:
    rescored = await confirmed(served, QUESTIONS[:8], temperature=1.0)
    assert rescored.not_comparable == 0
    assert len(rescored.differences) >= 80
    assert rescored.quantile(1) <= 1e-4


async def test_a_tool_is_called_over_several_turns(served: Served) -> None:
    models = [served.model(temperature=0.0, max_new_tokens=96) for _ in QUESTIONS]
    ledgers = await asyncio.gather(*map(roll_out, models, QUESTIONS))
    calls = [call.status for ledger in ledgers for turn in ledger for call in turn.draft.calls]
    assert calls.count("ok") >= len(QUESTIONS) // 2
    assert max(len(ledger) for ledger in ledgers) >= 3


async def test_logprob_semantics_are_measured_as_the_server_was_started(served: Served) -> None:
    # vLLM reports raw logprobs by default, SGLang divides by the temperature first.
    assert served.policy.info.processed_logprobs is (served.kind == "sglang")
    rescored = await confirmed(served, QUESTIONS[:2], temperature=0.5)
    if served.kind == "sglang":
        assert len(rescored.differences) == 0
        assert rescored.not_comparable > 0
    else:
        assert rescored.quantile(1) <= 1e-4


async def test_a_cancelled_task_leaves_no_turn_and_frees_the_server(served: Served) -> None:
    model = served.model(temperature=1.0, max_new_tokens=1500, ignore_eos=True)
    task = asyncio.ensure_future(make_agent(model).invoke_async("Write a very long story about numbers."))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(model.ledger) == 0
    assert len(await roll_out(served.model(temperature=0.0, max_new_tokens=16), "Hi?")) >= 1


async def test_an_id_outside_the_vocabulary_is_not_sent(served: Served) -> None:
    model = served.model(temperature=0.0, max_new_tokens=4)
    request = TokenRequest(np.array([1, 10**7], np.int32), served.policy.sampling(model._settings.sampling), "bad")
    with pytest.raises(BadRequestError, match="vocabulary"):
        await generate(served.policy.backend, request)
    assert len(await roll_out(model, "Hi?")) >= 1


class Sum(BaseModel):
    total: int


async def test_structured_output_is_constrained_json(served: Served) -> None:
    model = served.model(temperature=0.0, max_new_tokens=200)
    prompt: Any = [{"role": "user", "content": [{"text": 'What is 2 + 3? Answer like {"total": 7}.'}]}]
    outputs = [event async for event in model.structured_output(Sum, prompt)]
    assert isinstance(outputs[-1]["output"], Sum)
    assert model.ledger[0].draft.constrained
    check_ledger(model.ledger)
