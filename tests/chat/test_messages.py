"""Conversion of Strands messages to template messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.types.content import Message

from support import zoo
from support.conversations import answer, calls, results, translated, user
from tito_core.chat.messages import (
    MALFORMED_CALL,
    SYSTEM_SOURCE,
    TOOLS_SOURCE,
    UnsupportedContentError,
    template_messages,
    template_tools,
    with_sampled_id,
)
from tito_core.chat.traced import sources
from tito_core.turn.inputs import system_text


def contents(*messages: Message) -> list[str]:
    return [message["content"] for message in translated(template_messages(list(messages)))]


def test_all_text_blocks_in_order() -> None:
    assert contents(user("a", "b\n", "", "c")) == ["a\nb\n\n\nc"]
    assert contents(user()) == [""]


def test_every_character_is_content_of_its_message() -> None:
    messages = [user("a", "b"), *calls(("f", {"k": "v"}), text="t", reasoning="r"), results("x"), answer("y")]
    found = template_messages(messages, "s", first=3)
    assert [set(sources(message)) for message in found] == [{SYSTEM_SOURCE}, {3}, {4}, {5}, {6}]
    for message in found:
        text = message["content"]
        assert sum(stop - start for start, stop, _ in text.spans) == len(text)


def test_calls_and_reasoning_keep_their_shape() -> None:
    [message] = calls(("f", {"k": [1, {"x": "v"}], "n": None}), ("g", {}), text="t", reasoning="r")
    assert translated(template_messages([message])) == [
        {
            "role": "assistant",
            "content": "t",
            "reasoning_content": "r",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"k": [1, {"x": "v"}], "n": None}},
                },
                {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        }
    ]


def test_results_are_ordered_by_call_and_named_after_it() -> None:
    many = results(*(str(i) for i in range(12)))
    many["content"].sort(key=lambda block: block["toolResult"]["toolUseId"])  # 0, 1, 10, 11, 2, ...
    many["content"].insert(0, {"text": "and then?"})
    many["content"].append({"toolResult": {"toolUseId": "unknown", "status": "success", "content": [{"text": "?"}]}})
    found = translated(template_messages([*calls(*((f"f{i}", {}) for i in range(12))), many]))[1:]
    assert [message["content"] for message in found] == [*map(str, range(12)), "?", "and then?"]
    assert [message["role"] for message in found] == ["tool"] * 13 + ["user"]
    assert [message["name"] for message in found[:-1]] == [*(f"f{i}" for i in range(12)), ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("", ""),
        ([], ""),
        (["a", "b"], "a\nb"),
        ({"b": [1, False, None], "a": "é"}, '{"b": [1, false, null], "a": "é"}'),
    ],
)
def test_result_contents(value: Any, text: str) -> None:
    assert contents(*calls(("f", {})), results(value))[1:] == [text]


def test_an_error_result_is_shown() -> None:
    shown = results("Error: no such place")
    shown["content"][0]["toolResult"]["status"] = "error"
    assert contents(*calls(("f", {})), shown)[1:] == ["Error: no such place"]


def test_feedback_replaces_the_result_of_a_malformed_call() -> None:
    malformed = {"reason": "Bad.", "raw": "<tool_call>{" + "x" * 300, "name": "look"}
    message = calls((MALFORMED_CALL, malformed), (MALFORMED_CALL, "edited"), ("f", {}))[0]
    unknown = f"Unknown tool: {MALFORMED_CALL}"
    found = contents(message, results(unknown, unknown, "3"))[1:]
    assert found == [
        "Error: tool call 1 of 3 to look was malformed and was not executed. Bad. It began: <tool_call>{" + "x" * 188,
        "Error: tool call 2 of 3 was malformed and was not executed.",
        "3",
    ]


def test_feedback_of_one_call_shows_all_of_a_short_one() -> None:
    message = calls((MALFORMED_CALL, {"reason": "Bad.", "raw": "<tool_call>"}))[0]
    found = contents(message, results(f"Unknown tool: {MALFORMED_CALL}"))[1:]
    assert found == ["Error: the tool call was malformed and was not executed. Bad. It said: <tool_call>"]


def test_a_hooks_text_on_a_malformed_call_follows_the_feedback() -> None:
    message = calls((MALFORMED_CALL, {"reason": "Bad.", "raw": ""}))[0]
    found = contents(message, results("Only two calls are left."))[1:]
    assert found == ["Error: the tool call was malformed and was not executed. Bad.\nOnly two calls are left."]


def test_a_malformed_call_is_rendered_with_its_sampled_name_and_raw_text() -> None:
    message = calls((MALFORMED_CALL, {"reason": "Bad.", "raw": "<tool_call>", "name": "look"}), (MALFORMED_CALL, {}))[0]
    answered, first, second = translated(template_messages([message, results("", "")]))
    assert [call["function"] for call in answered["tool_calls"]] == [
        {"name": "look", "arguments": {"raw": "<tool_call>"}},
        {"name": MALFORMED_CALL, "arguments": {"raw": ""}},
    ]
    assert (first["name"], second["name"]) == ("look", MALFORMED_CALL)


def test_a_template_renders_the_sampled_ids() -> None:
    message = calls(("look", {}), ("look", {}))[0]
    shown = results("a", "b")
    for number, sampled in enumerate(("functions.look:0", None)):
        own = with_sampled_id(f"call_0123abcd_{number}", sampled)
        message["content"][number]["toolUse"]["toolUseId"] = own
        shown["content"][number]["toolResult"]["toolUseId"] = own
    said, *found = translated(template_messages([message, shown]))
    wanted = ["functions.look:0", "call_0123abcd_1"]
    assert [call["id"] for call in said["tool_calls"]] == [message["tool_call_id"] for message in found] == wanted


def test_cache_points_are_ignored() -> None:
    message = user("a")
    message["content"].append({"cachePoint": {"type": "default"}})
    assert contents(message) == ["a"]


@pytest.mark.parametrize("block", [{"video": {}}, {"document": {}}, {}])
def test_unsupported_blocks_are_refused(block: Any) -> None:
    message = user("a")
    message["content"].append(block)
    with pytest.raises(UnsupportedContentError, match=f"a '{next(iter(block), 'empty')}' block"):
        template_messages([message])
    shown = results("a")
    shown["content"][0]["toolResult"]["content"].append(block)
    with pytest.raises(UnsupportedContentError, match="Tool result 'call_0'"):
        template_messages([*calls(("f", {})), shown])


def test_a_result_that_is_not_json_is_refused() -> None:
    with pytest.raises(UnsupportedContentError, match=r"'call_0' .*'json'"):
        template_messages([*calls(("f", {})), results({"a": object()})])


def test_tools_are_functions_with_traced_schemas() -> None:
    spec: Any = {"name": "f", "description": "d", "inputSchema": {"json": {"properties": {"k": {"type": "string"}}}}}
    bare: Any = {"name": "g", "inputSchema": {"type": "object"}}  # without a description, or "json" around the schema
    found = template_tools([spec, bare])
    assert translated(found) == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"properties": {"k": {"type": "string"}}}},
        },
        {"type": "function", "function": {"name": "g", "description": "", "parameters": {"type": "object"}}},
    ]
    assert set(sources(found)) == {TOOLS_SOURCE}
    assert template_tools([]) is None
    assert template_tools(None) is None


NESTED: Any = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number", "minimum": -1.5}}, "title": "é"}},
    "properties": {
        "at": {"$ref": "#/$defs/Point"},
        "many": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "default": []},
        "how": {"enum": ["a", 1, True, None]},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("described", [True, False])
def test_nested_schemas_reach_the_prompt_unchanged(described: bool) -> None:
    spec: Any = {"name": "look", "inputSchema": {"json": NESTED}} | ({"description": "Look."} if described else {})
    template, tokenizer = zoo.template("qwen3"), zoo.tokenizer("qwen3")
    text = tokenizer.decode(template.first_prompt([user("a")], None, [spec]).ids)
    shown = json.loads(text.split("<tools>\n")[1].split("\n</tools>")[0])
    function = {"name": "look", "description": "Look." if described else "", "parameters": NESTED}
    assert shown == {"type": "function", "function": function}
    assert list(shown["function"]["parameters"]) == list(NESTED)


@pytest.mark.parametrize(
    ("prompt", "blocks", "text"),
    [
        (None, None, None),
        (None, [], None),
        ("a", [{"text": "b"}], "a"),
        (None, [{"text": "a"}, {"cachePoint": {"type": "default"}}, {"text": "b\n"}, {"text": ""}], "a\nb\n\n"),
        (None, [{"cachePoint": {"type": "default"}}], None),
    ],
)
def test_a_system_prompt_is_text_or_blocks(prompt: str | None, blocks: Any, text: str | None) -> None:
    assert system_text(prompt, blocks) == text


def test_reasoning_without_text_shows_nothing() -> None:
    message: Any = {"role": "assistant", "content": [{"reasoningContent": {"redactedContent": b"?"}}, {"text": "a"}]}
    assert translated(template_messages([message])) == [{"role": "assistant", "content": "a"}]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4), st.booleans())
def test_blocks_are_joined_in_order(texts: list[str], results_: list[str], fails: bool) -> None:
    shown = results(results_)
    shown["content"][0]["toolResult"]["status"] = "error" if fails else "success"
    shown["content"] += [{"text": text} for text in texts]
    found = contents(*calls(("f", {})), shown)[1:]
    assert found == ["\n".join(results_), *(["\n".join(texts)] if texts else [])]
