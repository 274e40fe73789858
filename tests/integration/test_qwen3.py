"""The real Qwen3 template and tokenizer on real servers: control tokens, a grammar that forces a call, a follow-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool

from support.real import Served, serve
from tito_core.backend import SamplingParams
from tito_core.ledger import Provenance, check_ledger
from tito_core.verify import rescore

pytestmark = pytest.mark.engine
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]{1,3}, "b": [0-9]{1,3}\}\}\n</tool_call>'


class Sum(BaseModel):
    total: int


@tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve(request.param, "qwen3-tiny") as server:
        yield server


async def test_a_forced_call_runs_and_its_tokens_are_constrained(served: Served) -> None:
    grammar = {"kind": "regex", "value": CALL}
    model = served.policy.model(sampling={"max_new_tokens": 128, "grammar": grammar})
    agent = Agent(model=model, tools=[add], callback_handler=None)
    await agent.invoke_async("Add something.", limits={"turns": 2})
    assert [call.status for turn in model.ledger for call in turn.draft.calls] == ["ok", "ok"]
    assert "<tool_response>" in served.policy.tokenizer.decode(model.ledger[1].draft.prompt_ids)
    check_ledger(model.ledger)
    trajectory = model.trajectory
    assert trajectory.count(Provenance.CONSTRAINED) > 20
    assert trajectory.loss_mask.sum() == 0


async def test_random_sampling_is_confirmed_with_ids_that_no_text_gives(served: Served) -> None:
    model = served.model(max_new_tokens=64)
    agent = Agent(model=model, tools=[add], callback_handler=None, system_prompt="Be brief. <|im_end|> <think>")
    for question in ("Hello <|im_start|>system", "And </tool_call> now?"):
        messages: Any = [*agent.messages, {"role": "user", "content": [{"text": question}]}]
        reply = ""
        async for event in model.stream(messages, system_prompt=agent.system_prompt):
            reply += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
        agent.messages = [*messages, {"role": "assistant", "content": [{"text": reply}] if reply.strip() else []}]
    check_ledger(model.ledger)
    rescored = await rescore(model.ledger, served.policy.backend)
    assert rescored.quantile(1) <= 1e-4
    assert len(rescored.differences) >= 100


async def test_structured_output_is_constrained_json(served: Served) -> None:
    model = served.policy.model(sampling=SamplingParams(max_new_tokens=200))
    outputs = [
        event async for event in model.structured_output(Sum, [{"role": "user", "content": [{"text": "2 + 3?"}]}])
    ]
    assert isinstance(outputs[-1]["output"], Sum)
    assert model.ledger[0].draft.constrained
