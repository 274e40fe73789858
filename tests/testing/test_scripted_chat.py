"""The chat route of a scripted engine answers as the recorded vLLM did: every key and type, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.scripted import tokenizer
from tito_conformance.testing import Replay, scripted_engine
from tito_conformance.testing.chat import ChatWire

RECORDED = Path(__file__).parents[1] / "wire/vllm-0.32.0-more"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 - 093"}}\n</tool_call><|im_end|>'


def shape(value: Any) -> Any:
    """Return a value's keys and types; what stands for null or is not told apart here is None."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items() if name not in ("usage", "system_fingerprint")}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], dict) else list
    return None if value is None else type(value)


async def answer(body: dict[str, Any]) -> bytes:
    loaded = tokenizer("qwen3-tiny")
    ids = loaded.encode(CALL, add_special_tokens=False)
    script = Replay([ids])
    engine = scripted_engine(
        "vllm", script, vocab_size=len(loaded), eos_ids=[loaded.eos_token_id], decode=loaded.decode, model="qwen3-tiny"
    )
    engine.wire = ChatWire(engine.wire, loaded)
    response = await engine.handle("POST", "/v1/chat/completions", {}, json.dumps(body).encode())
    assert response.status == 200
    return response.content


async def test_a_whole_answer() -> None:
    recorded = json.loads((RECORDED / "chat_hermes_nothink.json").read_text())
    found, expected = (
        shape(value) for value in (json.loads(await answer(recorded["request"]["body"])), recorded["response"])
    )
    for each in (found, expected):
        [entry] = each["choices"][0]["logprobs"]["content"]
        entry.pop("bytes")  # the scripted route leaves them out
    assert found == expected


async def test_a_stream() -> None:
    recorded = json.loads((RECORDED / "chat_hermes_stream.json").read_text())
    events = (await answer(recorded["request"]["body"])).decode().split("\n\n")
    found = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    expected = [event for event in recorded["response"]["_sse"] if isinstance(event, dict)]
    assert shape(found[0]) == shape(expected[0])
    assert shape(found[1])["choices"][0].keys() == shape(expected[1])["choices"][0].keys()
    first = [deltas_of(each) for each in (found, expected)]
    assert first[0][0].keys() == first[1][0].keys()  # a call begins with its id, type and name
    assert first[0][1].keys() == first[1][1].keys()  # and goes on with arguments alone
    assert json.loads(first[0][1]["function"]["arguments"]) == {"expression": "6 - 093"}
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def deltas_of(events: list[Any]) -> list[Any]:
    return [
        event["choices"][0]["delta"]["tool_calls"][0]
        for event in events
        if event["choices"][0]["delta"].get("tool_calls")
    ]


async def test_a_conversation_beyond_the_context_is_refused_as_recorded() -> None:
    loaded = tokenizer("qwen3-tiny")
    engine = scripted_engine("vllm", Replay([]), vocab_size=len(loaded), decode=loaded.decode, max_model_len=100)
    engine.wire = ChatWire(engine.wire, loaded)
    body = {"messages": [{"role": "user", "content": "hi " * 200}]}
    response = await engine.handle("POST", "/v1/chat/completions", {}, json.dumps(body).encode())
    assert response.status == 400
    assert json.loads(response.content) == {
        "error": {
            "message": "This model's maximum context length is 100 tokens. However, your prompt contains at least 101 "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            "input prompt. (parameter=input_tokens, value=101)",
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        }
    }
