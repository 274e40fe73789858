"""Conversion of Strands messages to template messages, feedback on malformed calls, and refusals."""

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
    MessageFormat,
    UnsupportedContentError,
    sampled_id,
    template_messages,
    template_tools,
    with_sampled_id,
)
from tito_core.chat.traced import Traced, sources

PARTS = MessageFormat("string", "thinking", text_and_reasoning=True, parts=True)
CONVERSATION = [
    user("Why?", "Say."),
    *calls(("look", {"at": "é"}), ("find", {}), text="Let me.", reasoning="Hm."),
    results("seen", {"n": [1, None], "é": False}),
    answer("So.", reasoning="Ah."),
    user("And?"),
]


def call(index: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(index: int, name: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index}", "name": name, "content": content}


def test_a_conversation_in_the_default_format() -> None:
    assert translated(template_messages(CONVERSATION, "Be brief.")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?\nSay."},
        {
            "role": "assistant",
            "content": "Let me.",
            "reasoning_content": "Hm.",
            "tool_calls": [call(0, "look", {"at": "é"}), call(1, "find", {})],
        },
        result(0, "look", "seen"),
        result(1, "find", '{"n": [1, null], "é": false}'),
        {"role": "assistant", "content": "So.", "reasoning_content": "Ah."},
        {"role": "user", "content": "And?"},
    ]
    assert translated(template_messages(CONVERSATION, ""))[0]["role"] == "user"


def test_a_conversation_in_another_format() -> None:
    def part(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    assert translated(template_messages(CONVERSATION, "Be brief.", message_format=PARTS)) == [
        {"role": "system", "content": part("Be brief.")},
        {"role": "user", "content": part("Why?\nSay.")},
        {
            "role": "assistant",
            "content": part("Let me."),
            "thinking": "Hm.",
            "tool_calls": [call(0, "look", '{"at": "é"}'), call(1, "find", "{}")],
        },
        result(0, "look", part("seen")),
        result(1, "find", part('{"n": [1, null], "é": false}')),
        {"role": "assistant", "content": part("So."), "thinking": "Ah."},
        {"role": "user", "content": part("And?")},
    ]


def test_every_string_is_traced_to_its_message() -> None:
    def check(value: Any, key: str = "") -> None:
        if isinstance(value, dict):
            for inner, item in value.items():
                check(item, inner)
        elif isinstance(value, list):
            for item in value:
                check(item, key)
        elif isinstance(value, str) and key not in ("role", "type"):
            assert isinstance(value, Traced), (key, value)
            assert sum(stop - start for start, stop, _ in value.spans) == len(value)

    for message_format in (MessageFormat(), PARTS):
        found = template_messages(CONVERSATION, "Be brief.", first=7, message_format=message_format)
        check(found)
        assert [set(sources(message)) for message in found] == [{SYSTEM_SOURCE}, {7}, {8}, {9}, {9}, {10}, {11}]
    tools = template_tools([{"name": "f", "description": "d", "inputSchema": {"json": {"k": ["v"]}}}])
    check(tools)
    assert set(sources(tools)) == {TOOLS_SOURCE}


def test_reasoning_is_dropped_only_with_text_and_calls() -> None:
    alone = MessageFormat(text_and_reasoning=False)
    found = template_messages([*CONVERSATION, *calls(("f", {}), reasoning="Oh.")], message_format=alone)
    assert [message.get("reasoning_content") for message in translated(found)] == [
        None, None, None, None, "Ah.", None, "Oh."
    ]  # fmt: skip


def feedback(*named: tuple[str, Any]) -> list[str]:
    """Return the texts of the results of calls that Strands did not run."""
    message = calls(*named)[0]
    shown = results(*(f"Unknown tool: {MALFORMED_CALL}" if name == MALFORMED_CALL else "fine" for name, _ in named))
    return [str.__str__(each["content"]) for each in template_messages([message, shown])[1:]]


def malformed(**given: Any) -> tuple[str, dict[str, Any]]:
    return MALFORMED_CALL, given


@pytest.mark.parametrize(
    ("named", "read"),
    [
        (
            [malformed(reason="Bad.", raw="<c>{")],
            ["Error: the tool call was malformed and was not executed. Bad. It said: <c>{"],
        ),
        (
            [("look", {}), malformed(reason="Bad.", raw="<c>", name="find")],
            ["fine", "Error: tool call 2 of 2 to find was malformed and was not executed. Bad. It said: <c>"],
        ),
        (
            [malformed(raw="x" * 200), ("look", {}), malformed(raw="y" * 201)],
            [
                "Error: tool call 1 of 3 was malformed and was not executed. It said: " + "x" * 200,
                "fine",
                "Error: tool call 3 of 3 was malformed and was not executed. It began: " + "y" * 200,
            ],
        ),
        ([malformed()], ["Error: the tool call was malformed and was not executed."]),
        ([malformed(reason="Bad.")], ["Error: the tool call was malformed and was not executed. Bad."]),
        ([(MALFORMED_CALL, None)], ["Error: the tool call was malformed and was not executed."]),
    ],
)
def test_feedback_on_malformed_calls(named: Any, read: list[str]) -> None:
    assert feedback(*named) == read


@pytest.mark.parametrize(
    ("malformed", "shown"),
    [
        ({"name": "look", "raw": "<c>", "reason": "Bad."}, ("look", {"raw": "<c>"})),
        ({"raw": "<c>"}, (MALFORMED_CALL, {"raw": "<c>"})),
        ({"name": "look"}, ("look", {"raw": ""})),
        ("edited", (MALFORMED_CALL, "edited")),
    ],
)
def test_a_malformed_call_is_rendered_as_it_was_sampled(malformed: Any, shown: tuple[str, Any]) -> None:
    message, answered = translated(template_messages([*calls((MALFORMED_CALL, malformed)), results("x")]))
    assert message["tool_calls"] == [call(0, *shown)]
    assert (answered["name"], answered["tool_call_id"]) == (shown[0], "call_0")


@pytest.mark.parametrize(
    ("block", "kind"), [({"document": {}}, "document"), ({"video": {}, "x": 1}, "video"), ({}, "empty")]
)
def test_an_unsupported_block_is_refused(block: Any, kind: str) -> None:
    message: Message = {"role": "user", "content": [block]}
    with pytest.raises(UnsupportedContentError, match=f"'{kind}' block.*Send text"):
        template_messages([message])


@pytest.mark.parametrize(
    ("block", "kind", "why"),
    [
        ({"video": {}}, "video", "'json'"),
        ({}, "empty", "'json'"),
        ({"json": {"a": {1}}}, "json", "Object of type set is not JSON serializable"),
    ],
)
def test_an_unsupported_result_is_refused(block: Any, kind: str, why: str) -> None:
    shown = results("x")
    shown["content"][0]["toolResult"]["content"] = [block]
    with pytest.raises(UnsupportedContentError, match=f"'call_0' holds a '{kind}' block.*{why}.*Return text"):
        template_messages([*calls(("f", {})), shown])


def test_results_of_calls_of_an_earlier_turn_have_no_tool_name() -> None:
    found = translated(template_messages([*calls(("look", {})), results("x"), answer("So."), results("y")]))
    assert [message["name"] for message in found if message["role"] == "tool"] == ["look", ""]


@pytest.mark.parametrize(
    ("ours", "sampled", "shown"),
    [
        ("call_0123abcd_0", "functions.look:0", "functions.look:0"),
        ("call_0123abcd_12", "a.b\nc", "a.b\nc"),
        ("call_0123abcd_0", None, "call_0123abcd_0"),
        ("call_0123abcd_0", "", "call_0123abcd_0"),
    ],
)
def test_a_sampled_id_is_rendered_again(ours: str, sampled: str | None, shown: str) -> None:
    whole = with_sampled_id(ours, sampled)
    assert whole.startswith(ours)
    assert sampled_id(whole) == shown
    assert sampled_id(f"x{whole}") == f"x{whole}"


def contents(*messages: Message) -> list[str]:
    return [message["content"] for message in translated(template_messages(list(messages)))]


def test_results_are_ordered_by_call_and_named_after_it() -> None:
    many = results(*(str(i) for i in range(12)))
    many["content"].sort(key=lambda block: block["toolResult"]["toolUseId"])  # 0, 1, 10, 11, 2, ...
    many["content"].insert(0, {"text": "and then?"})
    many["content"].append({"toolResult": {"toolUseId": "unknown", "status": "success", "content": [{"text": "?"}]}})
    found = translated(template_messages([*calls(*((f"f{i}", {}) for i in range(12))), many]))[1:]
    assert [message["content"] for message in found] == [*map(str, range(12)), "?", "and then?"]
    assert [message["role"] for message in found] == ["tool"] * 13 + ["user"]
    assert [message["name"] for message in found[:-1]] == [*(f"f{i}" for i in range(12)), ""]


def test_a_hooks_text_on_a_malformed_call_follows_the_feedback() -> None:
    message = calls((MALFORMED_CALL, {"reason": "Bad.", "raw": ""}))[0]
    found = contents(message, results("Only two calls are left."))[1:]
    assert found == ["Error: the tool call was malformed and was not executed. Bad.\nOnly two calls are left."]


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


def test_reasoning_without_text_shows_nothing() -> None:
    hidden: Any = {"reasoningContent": {"redactedContent": b"?"}}
    message: Message = {"role": "assistant", "content": [hidden, {"text": "a"}, {"text": "b"}]}
    assert translated(template_messages([message])) == [{"role": "assistant", "content": "a\nb"}]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4), st.booleans())
def test_blocks_are_joined_in_order(texts: list[str], results_: list[str], fails: bool) -> None:
    shown = results(results_)
    shown["content"][0]["toolResult"]["status"] = "error" if fails else "success"
    shown["content"] += [{"text": text} for text in texts]
    found = contents(*calls(("f", {})), shown)[1:]
    assert found == ["\n".join(results_), *(["\n".join(texts)] if texts else [])]
