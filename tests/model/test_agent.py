"""Strands agents over scripted engines of both backends: every token is in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException, StructuredOutputException

from support.histories import add
from support.scripted import BACKENDS, END, Says, call, ids_of, model_of, tokenizer
from tito_core import store
from tito_core.ledger import Ledger, check_ledger

UUID = "00000000-0000-4000-8000-000000000000"


def agent_of(model: Any, **options: Any) -> Agent:
    return Agent(model=model, tools=[add], callback_handler=None, system_prompt="Be brief.", **options)


async def test_a_tool_is_called_and_every_token_is_in_the_trajectory() -> None:
    script = Says("Let me see. " + call("add", '{"a": 2, "b": 3}'), "It is 5.")
    model = model_of("sglang", script)
    agent = agent_of(model)
    result = await agent.invoke_async("What is 2 + 3?")
    assert str(result).strip() == "It is 5."
    assert [len(turn.draft.calls) for turn in model.ledger] == [1, 0]
    check_ledger(model.ledger)
    trajectory = model.trajectory
    text = tokenizer().decode(trajectory.token_ids)
    assert "<tool_response>\n5\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\nIt is 5.<|im_end|>")
    sampled = trajectory.token_ids[trajectory.loss_mask == 1].tolist()
    call_text = call("add", '{"a": 2, "b": 3}')
    assert sampled == ids_of(f"Let me see. {call_text}{END}") + ids_of(f"It is 5.{END}")
    assert np.isfinite(trajectory.logprobs[trajectory.loss_mask == 1]).all()


async def test_the_same_conversation_gives_byte_equal_ledgers_on_both_backends() -> None:
    records = []
    for kind in BACKENDS:
        script = Says(call("add", '{"a": 2, "b": 3}'), call("add", '{"a": 2}') + call("nope", "{}"), "It is 5.", "Ok.")
        model = model_of(kind, script, ledger=Ledger(UUID))
        agent = agent_of(model)
        await agent.invoke_async("What is 2 + 3?")
        await agent.invoke_async("Thanks 🦉")
        assert len(model.ledger) == 4
        records.append(store.encode(model.ledger, engine=False))
    assert records[0] == records[1]


@settings(max_examples=8, deadline=None)
@given(
    words=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4),
    answers=st.lists(st.lists(st.integers(3, 48000), min_size=0, max_size=12), min_size=1, max_size=4),
    cut=st.booleans(),
)
def test_any_conversation_of_any_ids_is_equal_on_both_and_keeps_the_laws(
    words: list[str], answers: list[list[int]], cut: bool
) -> None:
    async def run(kind: str) -> bytes:
        model = model_of(
            kind,
            Says(*([*ids, 2] for ids in answers)),
            ledger=Ledger(UUID),
            sampling={"max_new_tokens": 8 if cut else 64},
        )
        agent = agent_of(model)
        for word in words:
            with contextlib.suppress(MaxTokensReachedException):
                await agent.invoke_async(word, limits={"turns": 3})
        check_ledger(model.ledger)
        for trajectory in model.trajectories:
            assert trajectory.loss_mask.sum() <= sum(len(turn.draft.output_ids) for turn in model.ledger)
        assert len(model.trajectories) == 1, model.trajectories
        return store.encode(model.ledger, engine=False)

    assert asyncio.run(run("vllm")) == asyncio.run(run("sglang"))


@pytest.mark.parametrize("name", ["add.two", "my tool!", "Ünï", "x" * 65])
async def test_a_call_whose_name_strands_rewrites_is_continued(name: str) -> None:
    model = model_of("vllm", Says(call(name, "{}"), "Well.", "Fine."))
    agent = agent_of(model)
    await agent.invoke_async("Go.")
    await agent.invoke_async("And?")
    assert [turn.parent for turn in model.ledger] == [None, 0, 1]


async def test_no_system_prompt_and_an_empty_one_are_the_same() -> None:
    model = model_of("vllm", Says("One.", "Two."))
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async("A?")
    agent.system_prompt = ""
    await agent.invoke_async("B?")
    assert [turn.parent for turn in model.ledger] == [None, 0]


async def test_a_policy_that_calls_the_reserved_tool_does_not_write_its_own_reason() -> None:
    model = model_of("vllm", Says(call("tito_malformed_call", '{"reason": "SECRET"}'), "Well."))
    await agent_of(model).invoke_async("Go.")
    prompt = tokenizer().decode(model.ledger[1].draft.prompt_ids)
    assert prompt.count("<tool_call>") == 1
    assert "tito_malformed_call is not a tool" in prompt
    assert model.ledger[0].draft.calls[0].status == "malformed"


@pytest.mark.parametrize("kind", BACKENDS)
async def test_structured_output_is_validated_and_constrained_and_raises_when_it_is_cut_off(kind: str) -> None:
    class Sum(BaseModel):
        total: int

    prompt: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]
    options: dict[str, Any] = {"sampling": {"max_new_tokens": 8, "min_new_tokens": 1}, "stream": kind == "vllm"}
    model = model_of(kind, Says('{"total": 5}', '{"total"...'), **options)
    state: dict[str, Any] = {}
    events = [event async for event in model.structured_output(Sum, prompt, "Be brief.", model_state=state)]
    assert events[-1] == {"output": Sum(total=5)}
    assert [next(iter(event)) for event in events[:2] + events[-3:-1]] == [
        "messageStart", "contentBlockStart", "messageStop", "metadata"
    ]  # fmt: skip
    assert state["tito"]["turn"] == 0
    assert "Be brief." in tokenizer().decode(model.ledger[0].draft.prompt_ids)
    assert model.ledger[0].draft.constrained
    model.update_config(max_new_tokens=len(ids_of('{"total"')), min_new_tokens=0)
    with pytest.raises(StructuredOutputException, match=r"Sum.*max_new_tokens"):
        async for _ in model.structured_output(Sum, prompt):
            pass
