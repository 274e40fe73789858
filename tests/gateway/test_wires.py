"""The gateway's three wires, through the clients of their services: the same conversation is the same ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from itertools import chain, groupby
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic, BadRequestError
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai import AsyncOpenAI
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from strands_tito.gateway import Gateway, messages, responses
from strands_tito.gateway.reply import Refusal
from support.scripted import BACKENDS, Says, call, model_of, tokenizer
from tito_core import store
from tito_core.ledger import Ledger

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "all": {"type": "boolean", "default": False}}}
THINKS = "<think>\nSo.\n</think>\n\n"
TWO_CALLS = THINKS + "Two. " + call("add", '{"a":1.50}') + call("add", '{"a": 2, "all": true}')
ANSWERS = (TWO_CALLS, THINKS + "It is so.", "Yes.")
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
Ask = Callable[[Gateway, bool], Coroutine[Any, Any, list[Any]]]


def http(gateway: Gateway) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=gateway.transport(httpx2))


async def chat(gateway: Gateway, stream: bool) -> list[Any]:
    tools: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}]
    said: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    shown = []
    async with AsyncOpenAI(base_url="http://x/v1", api_key="k:s", http_client=http(gateway)) as client:
        for _ in ANSWERS:
            given: Any = {"model": "m", "messages": said, "tools": tools, "max_tokens": 200}
            if stream:
                async with client.chat.completions.stream(**given) as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**given)
            message = answer.choices[0].message
            said.append(json.loads(message.model_dump_json(exclude_none=True)))
            shown.append((message.content, [each.function.arguments for each in message.tool_calls or ()]))
            results = [{"role": "tool", "tool_call_id": each.id, "content": "3"} for each in message.tool_calls or ()]
            said += results or [{"role": "user", "content": "Sure?"}]
    return shown


async def anthropic_messages(gateway: Gateway, stream: bool) -> list[Any]:
    tools: Any = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
    said: list[Any] = [{"role": "user", "content": "Go."}]
    shown = []
    async with AsyncAnthropic(base_url="http://x", api_key="k:s", http_client=http(gateway)) as client:
        for _ in ANSWERS:
            given: Any = {"model": "m", "messages": said, "tools": tools, "max_tokens": 200, "system": "Be brief."}
            counted = await client.messages.count_tokens(**{k: v for k, v in given.items() if k != "max_tokens"})
            if stream:
                async with client.messages.stream(**given) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**given)
            cached = answer.usage.cache_read_input_tokens or 0
            assert counted.input_tokens == answer.usage.input_tokens + cached
            said.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            text = "".join(block.text for block in answer.content if block.type == "text")
            calls = [block for block in answer.content if block.type == "tool_use"]
            shown.append((text, [each.input for each in calls]))
            results = [{"type": "tool_result", "tool_use_id": each.id, "content": "3"} for each in calls]
            said.append({"role": "user", "content": results or "Sure?"})
    return shown


async def openai_responses(gateway: Gateway, stream: bool) -> list[Any]:
    tools: Any = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": False}]
    said: list[Any] = [{"role": "user", "content": "Go."}]
    shown = []
    async with AsyncOpenAI(base_url="http://x/v1", api_key="k:s", http_client=http(gateway)) as client:
        for _ in ANSWERS:
            given: Any = {"model": "m", "input": said, "tools": tools, "instructions": "Be brief."}
            if stream:
                async with client.responses.stream(**given, max_output_tokens=200) as events:
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**given, max_output_tokens=200)
            said += [json.loads(item.model_dump_json(exclude_none=True)) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            shown.append((answer.output_text, [each.arguments for each in calls]))
            results = [{"type": "function_call_output", "call_id": each.call_id, "output": "3"} for each in calls]
            said += results or [{"role": "user", "content": "Sure?"}]
    return shown


WIRES: dict[str, Ask] = {"chat": chat, "messages": anthropic_messages, "responses": openai_responses}


def content(ledger: Ledger) -> list[Any]:
    """Return what the turns of a ledger say, without what comes from ids and names of keys."""
    records = [store.records.turn_record(turn, engine=False) for turn in ledger]
    return [{key: value for key, value in each.items() if key != "fingerprint"} for each in records]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_conversation_is_the_same_ledger_on_every_wire(kind: str, stream: bool) -> None:
    found = {}
    for wire, ask in WIRES.items():
        async with Gateway(model_of(kind, Says(*ANSWERS)).policy) as gateway:
            shown = await ask(gateway, stream)
            ledger = gateway.ledger("s")
        assert [text for text, _ in shown] == ["Two.", "It is so.", "Yes."]
        arguments = [json.loads(each) if isinstance(each, str) else each for each in shown[0][1]]
        assert arguments == [{"a": 1.5}, {"a": 2, "all": True}]
        assert [path.turns for path in ledger.trajectories] == [(0, 1, 2)], wire
        found[wire] = content(ledger)
    assert found["chat"] == found["messages"] == found["responses"]


async def test_arguments_that_a_harness_adds_by_default_continue_the_turn() -> None:
    """As Claude Code 2.1 sends `replace_all`."""
    tools: Any = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
    continued, changed = [[(0, 1)]], [[(0,), (1,)]]
    cases: list[tuple[Any, str, Any]] = [({"all": False}, "k:s", continued), ({"all": False}, "k", continued)]
    for added, key, turns in [*cases, ({"all": True}, "k:s", changed), ({"b": 1}, "k:s", changed)]:
        gateway = Gateway(model_of("vllm", Says(call("add", '{"a": 1}'), "So.")).policy)
        async with AsyncAnthropic(base_url="http://x", api_key=key, http_client=http(gateway)) as client:
            said: list[Any] = [{"role": "user", "content": "Go."}]
            answer = await client.messages.create(model="m", messages=said, tools=tools, max_tokens=99)
            [used] = [block.model_dump() for block in answer.content]
            said.append({"role": "assistant", "content": [{**used, "input": {**used["input"], **added}}]})
            result = {"type": "tool_result", "tool_use_id": used["id"], "content": "1"}
            said.append({"role": "user", "content": [result]})
            await client.messages.create(model="m", messages=said, tools=tools, max_tokens=99)
        assert [[path.turns for path in ledger.trajectories] for ledger in gateway.ledgers] == turns


async def test_an_item_of_a_streamed_response_begins_empty_and_is_finished_part_by_part() -> None:
    """As OpenAI's reference has it; some clients read only the events that end in `done`."""
    gateway = Gateway(model_of("vllm", Says(TWO_CALLS)).policy)
    async with AsyncOpenAI(base_url="http://x/v1", api_key="k:s", http_client=http(gateway)) as client:
        tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
        stream = await client.responses.create(model="m", input="Go.", tools=tools, stream=True)
        events: list[Any] = [event async for event in stream]
    texts = [
        ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]
        for kind in ("reasoning_text", "output_text")
    ]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *parts, "output_item.done"] for parts in (*texts, call, call)]
    kinds = [kind for kind, _ in groupby(event.type.removeprefix("response.") for event in events)]
    assert kinds == ["created", *chain(*items), "completed"]
    begun = [event.item.model_dump() for event in events if event.type == "response.output_item.added"]
    assert not any(item.get("content") or item.get("arguments") for item in begun)
    finished = [event.text for event in events if event.type.endswith("_text.done")]
    finished += [event.arguments for event in events if event.type.endswith("arguments.done")]
    said = events[-1].response.output
    assert finished == [*(item.content[0].text for item in said[:2]), *(item.arguments for item in said[2:])]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_says_which_stop_sequence_ended_it(stream: bool) -> None:
    said: Any = [{"role": "user", "content": "Go."}]
    decode = lambda ids: str(tokenizer().decode(list(ids)))  # noqa: E731  # stop strings are in text
    gateway = Gateway(model_of("vllm", Says("One. Two. Three."), decode=decode).policy)
    async with AsyncAnthropic(base_url="http://x", api_key="k:s", http_client=http(gateway)) as client:
        given: Any = {"model": "m", "messages": said, "max_tokens": 99, "stop_sequences": ["Two."]}
        if stream:
            async with client.messages.stream(**given) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**given)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Two.")


async def test_a_conversation_that_is_too_long_is_what_harnesses_look_for() -> None:
    said: Any = [{"role": "user", "content": "word " * 60}]
    gateway = Gateway(model_of("vllm", Says("So."), max_model_len=30).policy)
    async with AsyncAnthropic(base_url="http://x", api_key="k:s", http_client=http(gateway)) as client:
        with pytest.raises(BadRequestError, match="prompt is too long"):
            await client.messages.create(model="m", messages=said, max_tokens=9)


def test_every_key_of_the_clients_requests_is_served_without_effect_or_refused() -> None:
    for module, keys in ((messages, MessageCreateParamsBase), (responses, ResponseCreateParamsBase)):
        places = [module.SERVED, module.WITHOUT_EFFECT, frozenset(module.REFUSED)]
        for key in [*keys.__annotations__, "stream"]:
            assert sum(key in place for place in places) == 1, (module.__name__, key)


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (messages.messages_turn, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        (messages.messages_turn, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (messages.messages_turn, {"messages": [{"role": "user", "content": 7}]}),
        (messages.messages_turn, {"messages": [], "tools": [{"type": "web_search_20250305", "name": "w"}]}),
        (messages.messages_turn, {"messages": [], "container": "c"}),
        (responses.responses_turn, {"input": [], "previous_response_id": "resp_1"}),
        (responses.responses_turn, {"input": [{"type": "item_reference", "id": "x"}]}),
        (responses.responses_turn, {"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}),
        (responses.responses_turn, {"input": 7}),
        (responses.responses_turn, {"input": [{"role": "developer", "content": [PICTURE]}]}),
        (responses.responses_turn, {"input": [{"role": "user", "content": [{**PICTURE, "image_url": "http://x/y"}]}]}),
        (responses.responses_turn, {"input": [{"role": "user", "content": [{**PICTURE, "image_url": None}]}]}),
    ],
)
def test_what_cannot_be_served_is_refused(read: Any, wrong: Any) -> None:
    with pytest.raises(Refusal):
        read(wrong)
