"""The public strategies draw valid values, and every kind of them."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import aiohttp
import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.client import Client
from support.scripted import backend_of, policy_of, tokenizer
from tito_conformance.testing import InProcessTransport, Replay, first, moves, scripted_engine, strategies
from tito_core.ledger import check_ledger

pytestmark = pytest.mark.suite

policy = cache(lambda: policy_of("sglang"))
FEW = settings(max_examples=15, deadline=None)


def test_testing_itself_needs_no_hypothesis() -> None:
    code = (
        "import sys, tito_conformance.testing, tito_conformance.testing.moves; assert 'hypothesis' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@FEW
@given(st.data())
def test_a_history_may_have_images(data: st.DataObject) -> None:
    files = data.draw(st.lists(strategies.pictures(), min_size=2, max_size=2))
    messages: list[Any] = data.draw(
        strategies.histories(data.draw(strategies.tool_specs()), images=st.sampled_from(files))
    )
    blocks = [block for message in messages for block in message["content"]]
    shown = [item for block in blocks for item in (block, *block.get("toolResult", {}).get("content", ()))]
    images = [item["image"] for item in shown if "image" in item]
    assert all(image["format"] == "png" and image["source"]["bytes"] in files for image in images)
    assert all(message["content"] for message in messages)


@FEW
@given(st.data())
def test_a_history_is_a_valid_strands_history(data: st.DataObject) -> None:
    tools = data.draw(strategies.tool_specs(min_size=0))
    messages: list[Any] = data.draw(strategies.histories(tools))
    assert messages[0]["role"] == messages[-1]["role"] == "user"
    by_name = {tool["name"]: tool["inputSchema"]["json"] for tool in tools}
    for before, after in itertools.pairwise(messages):
        assert (before["role"], after["role"]) in (("user", "assistant"), ("assistant", "user"))
        assert after["content"]
        calls = [block["toolUse"] for block in before["content"] if "toolUse" in block]
        results = [block["toolResult"]["toolUseId"] for block in after["content"] if "toolResult" in block]
        assert sorted(call["toolUseId"] for call in calls) == sorted(results)
        for call in calls:
            jsonschema.validate(call["input"], by_name[call["name"]])


@FEW
@given(st.data())
def test_a_model_answers_every_history(data: st.DataObject) -> None:
    tools: Any = data.draw(strategies.tool_specs(min_size=0))
    own = [str(token) for token in tokenizer().added_tokens_decoder.values()]
    messages: Any = data.draw(strategies.histories(tools, strategies.texts(own)))
    end = int(tokenizer().eos_token_id)
    script = Replay(data.draw(strategies.scripts(len(tokenizer()), [end])), cycle=True)
    engine = scripted_engine("sglang", script, vocab_size=len(tokenizer()), eos_ids=[end])
    model = replace(policy(), backend=backend_of(engine, "sglang")).model()

    async def answer() -> list[Any]:
        return [event async for event in model.stream(messages, tools)]

    assert any("messageStop" in event for event in asyncio.run(answer()))
    assert len(model.ledger) == 1
    check_ledger(model.ledger)


@FEW
@given(strategies.scripts(50, (2, 3)))
def test_a_script_ends_every_answer_once(script: list[Any]) -> None:
    for completion in script:
        *before, last = completion.output_ids
        assert last in (2, 3)
        assert not {2, 3} & set(before)
        assert all(0 <= token < 50 for token in before)


@FEW
@given(strategies.faults())
async def test_a_fault_affects_one_try_only(fault: Any) -> None:
    engine = scripted_engine("vllm", Replay([[5, 2]], cycle=True), eos_ids=[2], fault=first(1, fault))
    client = Client(InProcessTransport(engine), "http://scripted")
    body = {"model": "scripted", "prompt": [1, 4], "return_token_ids": True}
    try:
        failed = (await client.post("/v1/completions", json=body)).status >= 429
    except (aiohttp.ClientError, OSError, ValueError):
        failed = True
    sound = await client.post("/v1/completions", json=body)
    assert sound.json()["choices"][0]["token_ids"] == [5, 2]
    whole = (fault.reset_after or 0) + (fault.close_after or 0) > 1000
    assert failed or whole


@FEW
@given(st.lists(strategies.moves(["<|im_end|>"], reloads=True)))
def test_moves_survive_json(drawn: list[Any]) -> None:
    conversation = [moves.Stream(), moves.Want(top_logprobs=4, prompt_logprobs=True), *drawn]
    assert msgspec.json.decode(msgspec.json.encode(conversation), type=list[moves.AnyMove]) == conversation


@pytest.mark.parametrize("by_chance", [True, False])
def test_nondeterministic_moves_are_drawn_only_if_allowed(by_chance: bool) -> None:
    seen: set[type[Any]] = set()

    @settings(max_examples=200, deadline=None, database=None)
    @given(strategies.moves(by_chance=by_chance))
    def draw(move: Any) -> None:
        seen.add(type(move))

    draw()
    nondeterministic = {moves.Cancel, moves.Sampling, moves.Together}
    assert seen & nondeterministic == (nondeterministic if by_chance else set())
    assert {moves.Ask, moves.Cut, moves.Edit, moves.Force, moves.Rewind, moves.System} <= seen
    assert moves.Reload not in seen
