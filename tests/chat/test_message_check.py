"""Checked messages are counted character by character; an error names the place, the value and what to give instead."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tito_core.chat.message_check import (
    DEEPEST,
    InvalidMessageError,
    _count_simple,
    check_bounds,
    check_messages,
    check_opening,
    check_schemas,
    check_system_blocks,
    describe,
)
from tito_core.chat.messages import UnsupportedContentError

IMAGE = {"format": "png", "source": {"bytes": b"abc"}}
SPEC = {"name": "look", "description": "Look.", "inputSchema": {"json": {"type": "object"}}}
FIRST = {"role": "user", "content": [{"text": "Hi"}]}

words = st.text("aé\n\U0001f389", max_size=6)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(-9, 9), words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)

Sized = tuple[dict[str, Any], int]
"""A block, with its number of characters."""


def text(value: str) -> Sized:
    return {"text": value}, len(value)


def result_of(items: list[Sized], extra: dict[str, Any]) -> Sized:
    content = [item for item, _ in items]
    return {"toolResult": {"toolUseId": "call_0", "content": content, **extra}}, sum(size for _, size in items)


def call_of(value: Any) -> Sized:
    return {"toolUse": {"toolUseId": "call_0", "name": "look", "input": value}}, len(json.dumps(value))


texts = words.map(text)
items = st.one_of(
    texts,
    st.just(({"image": IMAGE}, 0)),
    values.map(lambda value: ({"json": value}, len(json.dumps(value, ensure_ascii=False)))),
)
results = st.builds(result_of, st.lists(items, max_size=3), st.sampled_from([{}, {"status": "error"}]))
thoughts = words.map(lambda value: ({"reasoningContent": {"reasoningText": {"text": value}}}, len(value)))
free = st.sampled_from([({"cachePoint": {"type": "default"}}, 0), ({"reasoningContent": {"redactedContent": b"a"}}, 0)])
named = words.map(lambda value: ({"text": value, "note": "not a block's kind"}, len(value)))
simple = st.builds(result_of, st.lists(texts, max_size=3), st.just({"status": "success"}))
calls = st.dictionaries(words, values, max_size=3).map(call_of)
messages = st.one_of(
    st.tuples(st.just("user"), st.lists(texts | simple, max_size=3)),
    st.tuples(st.just("user"), st.lists(texts | named | results | free | st.just(({"image": IMAGE}, 0)), max_size=3)),
    st.tuples(st.just("assistant"), st.lists(texts | named | thoughts | free | calls, max_size=3)),
)


@given(st.lists(messages, max_size=4), st.sampled_from([list, tuple]))
def test_the_count_is_that_of_all_characters_of_all_blocks(
    made: list[tuple[str, list[Sized]]], several: Callable[[Any], Any]
) -> None:
    history = [{"role": role, "content": several([block for block, _ in blocks])} for role, blocks in made]
    before = repr(history)
    assert check_messages(several(history)) == sum(size for _, blocks in made for _, size in blocks)
    assert repr(history) == before


def user(*blocks: Any) -> Any:
    return {"role": "user", "content": list(blocks)}


def called(**changes: Any) -> Any:
    use = {"toolUseId": "call_7", "name": "look", "input": {}, **changes}
    return {"role": "assistant", "content": [{"toolUse": {key: value for key, value in use.items() if value != "-"}}]}


def returned(*items: Any, **changes: Any) -> Any:
    return user({"toolResult": {"toolUseId": "call_7", "content": list(items), **changes}})


def refusal(message: Any) -> str:
    with pytest.raises(InvalidMessageError) as caught:
        check_messages([FIRST, message])
    return str(caught.value)


BLOCK = "messages[1]['content'][0]"
USE, RESULT = f"{BLOCK}['toolUse']", f"{BLOCK}['toolResult']"
ITEM = f"{RESULT}['content'][0]"


@pytest.mark.parametrize(
    ("message", "place", "remedy"),
    [
        ("Hi", "messages[1] is 'Hi'", "'role' and 'content'"),
        ({"content": []}, "messages[1] has no role", "'user' or 'assistant'"),
        ({"role": None, "content": []}, "messages[1] has the role None", "'user' or 'assistant'"),
        ({"role": "tool", "content": []}, "messages[1] has the role 'tool'", "'user' or 'assistant'"),
        ({"role": "system", "content": []}, "messages[1] has the role 'system'", "system_prompt"),
        ({"role": "user"}, "messages[1] has no content", "[{'text': 'Hi'}]"),
        ({"role": "user", "content": None}, "messages[1]['content'] is None", "[{'text': 'Hi'}]"),
        ({"role": "user", "content": "Hi"}, "messages[1]['content'] is 'Hi'", "[{'text': 'Hi'}]"),
        (user("Hi"), f"{BLOCK} is 'Hi'", "{'text': 'Hi'}"),
        (user({}), f"{BLOCK} has none of the known keys: an empty dict", "cachePoint, image, reasoningContent, text"),
        (user({"text": "a", "image": IMAGE}), f"{BLOCK} has the keys 'text', 'image'", "toolResult, toolUse"),
        (user({"text": "a"}, {"text": 5}), "messages[1]['content'][1]['text'] is 5", "string"),
        (user({"image": None}), f"{BLOCK}['image'] is None", "dict"),
        (user({"image": {}}), f"{BLOCK}['image'] is an empty dict", "'format': 'png', 'source': {'bytes': ...}"),
        (user({"image": {"format": "png", "source": b""}}), f"{BLOCK}['image'] is a dict", "'bytes'"),
        (user({"image": {"source": {"bytes": b""}}}), f"{BLOCK}['image'] is a dict", "'format'"),
        (user({"reasoningContent": 5}), f"{BLOCK}['reasoningContent'] is 5", "dict"),
        (
            user({"reasoningContent": {"reasoningText": "a"}}),
            f"{BLOCK}['reasoningContent']['reasoningText'] is 'a'",
            "",
        ),
        (
            user({"reasoningContent": {"reasoningText": {}}}),
            f"{BLOCK}['reasoningContent']['reasoningText']['text'] is None",
            "string",
        ),
        (user(called()["content"][0]), f"{BLOCK} is a 'toolUse' block", "put it in an assistant message"),
        (
            {"role": "assistant", "content": returned()["content"]},
            f"{BLOCK} is a 'toolResult' block",
            "put it in a user message",
        ),
        (called(toolUseId=5), f"{USE}['toolUseId'] is 5", "string"),
        (called(name="-"), f"{USE}['name'] is None", "string"),
        (called(input="-"), f"{USE} has no 'input'", "{}"),
        (called(input={"a": [1, b"x"]}), f"call_7' are not JSON: {USE}['input']['a'][1] is of type bytes", ""),
        (called(input={1: 2}), f"call_7' are not JSON: {USE}['input'] has the key 1", "string"),
        (called(input={"a": [float("nan")]}), f"{USE}['input']['a'][0] is nan", ""),
        (called(input={"a": [2**64]}), f"{USE}['input']['a'][0] is {2**64}", "64 bits"),
        (called(input={"a": -(2**63) - 1}), f"{USE}['input']['a'] is {-(2**63) - 1}", "64 bits"),
        (called(input='{"a": 1}'), f"{USE}['input'] of tool call 'call_7' is '{{\"a\": 1}}'", "json.loads"),
        (called(input=[1]), f"{USE}['input'] of tool call 'call_7' is a list", "a dict"),
        (called(input=None), f"{USE}['input'] of tool call 'call_7' is None", "a dict"),
        (returned(toolUseId=None), f"{RESULT}['toolUseId'] is None", "string"),
        (returned(content="Hi"), f"{RESULT}['content'] is 'Hi'", "[{'text': '5'}]"),
        (returned("Hi"), f"{ITEM} is 'Hi'", "{'text': ...} or {'json': ...}"),
        (returned({"text": 5}), f"{ITEM}['text'] is 5", "string"),
        (returned({"image": []}), f"{ITEM}['image'] is an empty list", "'bytes'"),
    ],
)
def test_an_invalid_message_is_named_with_its_place_and_remedy(message: Any, place: str, remedy: str) -> None:
    message_ = refusal(message)
    assert place in message_
    assert remedy in message_


def test_a_place_counts_from_the_first_message_of_the_history() -> None:
    with pytest.raises(InvalidMessageError, match=r"messages\[6\]"):
        check_messages([FIRST, "Hi"], first=5)
    with pytest.raises(InvalidMessageError, match=r"messages\[0\]"):
        check_messages(["Hi"])


def test_only_a_message_of_the_system_is_told_of_the_system_prompt() -> None:
    assert "system_prompt" in refusal({"role": "system", "content": []})
    assert "system_prompt" not in refusal({"role": "tool", "content": []})
    assert "['content']" not in refusal({"role": "user"})


BYTES = {"format": "png", "source": {"bytes": bytearray(b"a")}}
PLACED = {"format": "png", "source": {"bytes": b"a", "location": {"uri": "s3://a"}}}


@pytest.mark.parametrize(
    ("message", "place", "expected"),
    [
        (user({"video": {}}), BLOCK, ["'video'", "Message 1 (user)", "'...'"]),
        (user({"document": {}}), BLOCK, ["'document'", "Message 1 (user)"]),
        ({"role": "assistant", "content": [{"image": IMAGE}]}, BLOCK, ["image", "Message 1 (assistant)"]),
        (user({"image": BYTES}), f"{BLOCK}['image']['source']", ["type bytearray", "bytes(data)"]),
        (user({"image": PLACED}), f"{BLOCK}['image']['source']", ["'location'", "{'bytes': data}"]),
        (
            user({"image": {"format": "png", "source": {"location": 1}}}),
            f"{BLOCK}['image']['source']",
            ["'location'", "{'bytes': data}"],
        ),
        (returned({"image": BYTES}), f"{ITEM}['image']['source']", ["type bytearray"]),
        (returned({"document": {}}), ITEM, ["'document'", "'call_7'", "Message 1 (user)"]),
        (returned({"what": {}}), ITEM, ["'what'", "'call_7'"]),
        (returned({}), ITEM, ["'empty'", "'call_7'"]),
        (returned({"text": "a", "json": 1}), ITEM, ["'text' and 'json'", "'call_7'", "one item each"]),
        (returned({"text": "a", "video": 1}), ITEM, ["'text' and 'video'", "'call_7'"]),
        (returned({"json": {"a": [{1, 2}]}}), ITEM, [f"{ITEM}['json']['a'][0] is of type set", "'call_7'"]),
        (returned({"json": float("inf")}), ITEM, [f"{ITEM}['json'] is inf"]),
        (returned({"json": {("a",): 1}}), ITEM, [f"{ITEM}['json'] has the key a tuple"]),
        (returned({"json": [2**64]}), ITEM, [str(2**64), "64 bits"]),
    ],
)
def test_unsupported_content_is_named_with_its_place_and_remedy(message: Any, place: str, expected: list[str]) -> None:
    with pytest.raises(UnsupportedContentError) as caught:
        check_messages([FIRST, message])
    assert place in str(caught.value)
    assert [words for words in expected if words not in str(caught.value)] == []
    if "source" not in place:
        assert f"agent.{place} = " in str(caught.value)


def test_an_image_without_a_location_is_supported_and_one_without_bytes_names_no_type() -> None:
    assert check_messages([user({"image": {"format": "png", "source": {"bytes": b"a", "location": None}}})]) == 0
    with pytest.raises(UnsupportedContentError) as caught:
        check_messages([user({"image": {"format": "png", "source": {}}})])
    assert "of type " not in str(caught.value).split("This provider")[0]


def nested(levels: int, wrap: Callable[[Any], Any], inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = wrap(inner)
    return inner


WRAPS = pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: [0, "", x]])


@WRAPS
def test_values_nest_a_hundred_levels_deep_and_no_deeper(wrap: Callable[[Any], Any]) -> None:
    deepest, deeper = nested(DEEPEST, wrap), nested(DEEPEST + 1, wrap)
    check_bounds(deepest, "state")
    check_messages([called(input={"a": nested(DEEPEST - 1, wrap)}), returned({"json": deepest})])
    check_schemas([{**SPEC, "inputSchema": {"json": deepest}}])
    with pytest.raises(InvalidMessageError, match="state nests more than 100"):
        check_bounds(deeper, "state")
    with pytest.raises(InvalidMessageError, match=r"'call_7'.* messages\[0\] nests more than 100") as caught:
        check_messages([called(input={"a": deepest})])
    assert len(str(caught.value)) < 300
    with pytest.raises(UnsupportedContentError, match=r"\['json'\] nests more than 100"):
        check_messages([returned({"json": deeper})])
    with pytest.raises(InvalidMessageError, match=r"'look'.* nests more than 100"):
        check_schemas([{**SPEC, "inputSchema": {"json": deeper}}])


@settings(max_examples=30)
@given(
    st.integers(-(2**66), 2**66) | st.sampled_from([-(2**63), -(2**63) - 1, 2**64 - 1, 2**64]),
    st.sampled_from([lambda n: n, lambda n: [0.5, "a", n], lambda n: {"a": (n,)}]),
)
def test_integers_fit_into_64_bits(number: int, wrap: Callable[[int], Any]) -> None:
    value, fits = wrap(number), -(2**63) <= number < 2**64
    checks: list[tuple[Callable[[], object], type[ValueError]]] = [
        (partial(check_bounds, value, "state"), InvalidMessageError),
        (partial(check_messages, [called(input={"a": value})]), InvalidMessageError),
        (partial(check_messages, [returned({"json": value})]), UnsupportedContentError),
    ]
    for check, error in checks:
        if fits:
            check()
        else:
            with pytest.raises(error, match=f"{number}.* 64 bits"):
                check()


def test_bounds_are_of_any_value() -> None:
    check_bounds([object(), {1: float("nan")}, "a" * 1000, b"a", None], "state")


@pytest.mark.parametrize("value", [None, "Hi", {"role": "user"}, iter([])])
def test_messages_are_a_list_or_a_tuple(value: Any) -> None:
    checks: list[Callable[[], object]] = [partial(check_messages, value), partial(check_opening, value, None, None)]
    for check in checks:
        with pytest.raises(InvalidMessageError, match=r"messages is .*'role': 'user'") as caught:
            check()
        assert describe(value) in str(caught.value)


@pytest.mark.parametrize("several", [list, tuple])
def test_an_opening_is_checked_without_its_messages(several: Callable[[Any], Any]) -> None:
    specs = several([SPEC, {"name": "find", "inputSchema": {"json": {}}}])
    for system, tools in ((None, None), ("", several([])), ("Be brief.", specs)):
        check_opening(several(["not a message"]), system, tools)


@pytest.mark.parametrize(
    ("system", "tools", "expected"),
    [
        (["a"], None, ["system_prompt is a list", "string"]),
        (5, None, ["system_prompt is 5", "string"]),
        (None, "look", ["tool_specs is 'look'", "None"]),
        (None, [SPEC, "look"], ["tool_specs[1] is 'look'", "'name', 'description'", "'inputSchema'"]),
        (None, [{**SPEC, "name": ""}], ["tool_specs[0] is a dict", "non-empty"]),
        (None, [{**SPEC, "name": 5}], ["tool_specs[0] is a dict", "'name'"]),
        (None, [SPEC, {"name": "find"}], ["tool_specs[1]['inputSchema']", "'find'", "None", "{'json': {"]),
        (None, [{**SPEC, "inputSchema": {"json": "{}"}}], ["tool_specs[0]['inputSchema']", "'look'", "keys 'json'"]),
        (None, [{**SPEC, "description": None}], ["tool_specs[0]['description']", "'look'", "None", "string"]),
    ],
)
def test_an_invalid_opening_is_named_with_its_place_and_remedy(system: Any, tools: Any, expected: list[str]) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        check_opening([], system, tools)
    assert [words for words in expected if words not in str(caught.value)] == []


@pytest.mark.parametrize("several", [list, tuple])
def test_system_blocks_are_dicts_whose_texts_are_strings(several: Callable[[Any], Any]) -> None:
    check_system_blocks(several([{"text": "a"}, {"cachePoint": {}}, {}]))
    with pytest.raises(InvalidMessageError, match=r"system_prompt_content is 'Hi'.*'text'"):
        check_system_blocks("Hi")
    with pytest.raises(InvalidMessageError, match=r"system_prompt_content\[1\] is 'Hi'.*'text'"):
        check_system_blocks(several([{"text": "a"}, "Hi"]))
    with pytest.raises(InvalidMessageError, match=r"system_prompt_content\[1\]\['text'\] is 5"):
        check_system_blocks(several([{"text": "a"}, {"text": 5}]))


def test_a_schema_that_is_not_json_is_named_with_its_tool() -> None:
    check_schemas(None)
    check_schemas([SPEC])
    wrong = {"name": "find", "inputSchema": {"json": {"default": {1}}}}
    with pytest.raises(InvalidMessageError) as caught:
        check_schemas([SPEC, wrong])
    assert "'find'" in str(caught.value)
    assert "tool_specs[1]['inputSchema']['json']['default'] is of type set" in str(caught.value)


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        ("a", "'a'"),
        ("a" * 99, "'" + "a" * 59),
        (b"a", "of type bytes (b'a')"),
        (b"a" * 99, "of type bytes (b'" + "a" * 58 + ")"),
        (Silent(), "of type Silent (a value)"),
        ([1], "a list"),
        ((), "an empty tuple"),
        ([], "an empty list"),
        ({}, "an empty dict"),
        (OrderedDict(a=1), "a OrderedDict with the keys 'a'"),
        (dict.fromkeys("abcdefg"), "a dict with the keys 'a', 'b', 'c', 'd', 'e'"),
    ],
)
def test_a_wrong_value_is_shown_shortly_with_its_type(value: Any, expected: str) -> None:
    assert describe(value) == expected


def test_a_number_too_long_for_its_repr_is_still_shown() -> None:
    assert describe(10**5000) == "a value"


@given(st.lists(texts | simple, max_size=3))
def test_messages_of_texts_and_text_results_take_the_fast_path(blocks: list[Sized]) -> None:
    message = user(*(block for block, _ in blocks))
    assert _count_simple(message) == sum(size for _, size in blocks)
    for other in ({"cachePoint": {}}, {"text": "a", "image": IMAGE}, {"text": 5}, "Hi"):
        assert _count_simple(user(*message["content"], other)) is None
    assert _count_simple({**message, "role": "assistant"}) is None
    assert _count_simple({**message, "content": tuple(message["content"])}) is None
