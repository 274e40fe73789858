"""The events of a turn: blocks in order, a call's arguments as sampled, the stop reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent, tool
from strands.event_loop.streaming import stream_messages
from strands.types.exceptions import MaxTokensReachedException

from support.scripted import Says, call, ids_of, model_of, tokenizer, with_parts
from tito_core.ledger import check_ledger
from tito_core.parsing import get_tool_parser

ASKED: Any = [{"role": "user", "content": [{"text": "Go."}]}]
QWEN3 = "qwen3-tiny"
THOUGHT = "<think>\nHm.\n</think>\n\n"


@tool
def look(at: str = "", far: float = 0) -> str:
    """Look.

    Args:
        at: Where.
        far: How far.
    """
    return at


async def events_of(model: Any, **options: Any) -> list[Any]:
    return [event async for event in model.stream(ASKED, [look.tool_spec], **options)]


async def test_blocks_come_in_order_and_arguments_as_they_were_written() -> None:
    written = '{ "far" :1.50e1,\n"at":"\\u0041" }'
    second = '<tool_call>\n{"arguments": {} , "name": "look"}\n</tool_call>'
    answer = THOUGHT + "Let me look." + call("look", written) + second
    model = model_of("vllm", Says(answer, name=QWEN3), QWEN3, latency=0.005)
    events = await events_of(model)
    uuid = model.ledger.uuid[:8]
    sampled, prompt = len(ids_of(answer, QWEN3)) + 1, len(model.ledger[0].draft.prompt_ids)
    engine = model.ledger[0].draft.engine
    metadata = events.pop()["metadata"]
    latency_ms = metadata["metrics"].pop("latencyMs")
    assert latency_ms >= round(engine.latency_s * 1000) > 0
    assert events == [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockStart": {"start": {}}},
        {"contentBlockDelta": {"delta": {"reasoningContent": {"text": "Hm."}}}},
        {"contentBlockStop": {}},
        {"contentBlockStart": {"start": {}}},
        {"contentBlockDelta": {"delta": {"text": "Let me look."}}},
        {"contentBlockStop": {}},
        {"contentBlockStart": {"start": {"toolUse": {"toolUseId": f"call_{uuid}_1", "name": "look"}}}},
        {"contentBlockDelta": {"delta": {"toolUse": {"input": written}}}},
        {"contentBlockStop": {}},
        {"contentBlockStart": {"start": {"toolUse": {"toolUseId": f"call_{uuid}_2", "name": "look"}}}},
        {"contentBlockDelta": {"delta": {"toolUse": {"input": "{}"}}}},
        {"contentBlockStop": {}},
        {"messageStop": {"stopReason": "tool_use"}},
    ]
    assert metadata == {
        "usage": {
            "inputTokens": prompt,
            "outputTokens": sampled,
            "totalTokens": prompt + sampled,
            "cacheReadInputTokens": engine.cached_tokens,
        },
        "metrics": {},
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_strands_times_the_first_token_within_the_request(stream: bool) -> None:
    """Without a stream the whole answer is the first token, after what prepares the prompt and reads the answer."""
    model = model_of("vllm", Says("It is far."), stream=stream)
    *_, stopped = [event async for event in stream_messages(model, None, ASKED, [look.tool_spec])]
    metrics = stopped["stop"][3]
    assert 0 < metrics["timeToFirstByteMs"] <= metrics["latencyMs"]


async def test_arguments_that_were_not_sampled_as_json_are_json_of_their_text() -> None:
    answer = "<tool_call>\n<function=look>\n<parameter=at>\né\n</parameter>\n</function>\n</tool_call>"
    model = with_parts(model_of("vllm", Says(answer)), parser=get_tool_parser("qwen_xml", tokenizer()))
    deltas = [event["contentBlockDelta"]["delta"] for event in await events_of(model) if "contentBlockDelta" in event]
    assert deltas == [{"toolUse": {"input": '{"at": "é"}'}}]


async def test_an_id_that_the_policy_wrote_is_kept_inside_ours() -> None:
    one = "<|tool_call_begin|>functions.look:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    answer = f"<|tool_calls_section_begin|>{one.format(0)}{one.format(0)}<|tool_calls_section_end|>"
    model = model_of("sglang", Says(answer, "Well."))
    model = with_parts(model, parser=get_tool_parser("kimi_k2", tokenizer()))
    agent = Agent(model=model, tools=[look], callback_handler=None)
    await agent.invoke_async("Go.")
    uses = [block["toolUse"]["toolUseId"] for block in agent.messages[1]["content"] if "toolUse" in block]
    assert uses == [f"call_{model.ledger.uuid[:8]}_{number}.functions.look:0" for number in (1, 2)]
    assert [turn.parent for turn in model.ledger] == [None, 0]


NUMBERS = st.one_of(st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(st.none() | st.booleans() | NUMBERS | st.text('aé"\\\n🦉', max_size=4), st.lists, max_leaves=4)


@settings(max_examples=30)
@given(st.dictionaries(st.text('ab"é', min_size=1, max_size=3), VALUES, max_size=3), st.booleans(), st.booleans())
async def test_strands_messages_equal_the_ledgers(given_: Any, escaped: bool, spaced: bool) -> None:
    written = json.dumps(given_, ensure_ascii=escaped, indent=1 if spaced else None)
    model = model_of("vllm", Says(call("look", written), "Well.", "Yes.", name=QWEN3), QWEN3)
    agent = Agent(model=model, tools=[look], callback_handler=None)
    await agent.invoke_async("Go.")
    stored = agent.messages[1]["content"][0]["toolUse"]["input"]
    assert json.dumps(stored, sort_keys=True) == json.dumps(given_, sort_keys=True)
    await agent.invoke_async("Sure?")
    assert [turn.parent for turn in model.ledger] == [None, 0, 1]
    check_ledger(model.ledger)


@pytest.mark.parametrize(
    "cut", ['<tool_call>{"name": "look", "arguments": {"at": "x', call("look", "[") + "<tool_call>"]
)
async def test_no_text_of_calls_is_lost_when_the_limit_cuts_an_answer(cut: str) -> None:
    answer = THOUGHT + "So. " + call("look", "{}") + cut
    limit = {"max_new_tokens": len(ids_of(answer, QWEN3))}
    model = model_of("vllm", Says(answer + "...", name=QWEN3), QWEN3, sampling=limit)
    agent = Agent(model=model, tools=[look], callback_handler=None)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Go.")
    [thought, text] = agent.messages[1]["content"]
    assert thought["reasoningContent"]["reasoningText"]["text"] == "Hm."
    assert text["text"].startswith("So.\n" + call("look", "{}"))
    assert text["text"].replace("\n", "").endswith(cut)
