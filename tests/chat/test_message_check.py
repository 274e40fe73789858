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
    check_schemas,
    describe,
)
from tito_core.chat.messages import UnsupportedContentError

IMAGE = {"format": "png", "source": {"bytes": b"abc"}}
SPEC = {"name": "look", "description": "Look.", "inputSchema": {"json": {"type": "object"}}}


words = st.text("aé\n\U0001f389", max_size=6)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-9, 9), words),
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
    for part in ({"outputSchema": deeper}, {"inputSchema": {"json": {}, "more": deeper}}):
        with pytest.raises(InvalidMessageError, match=r"'look' .* tool_specs\[0\] nests more than 100"):
            check_schemas([{**SPEC, **part}])


@settings(max_examples=30)
@given(
    st.integers() | st.sampled_from([2**64, -(2**63) - 1, 10**4299, 10**4300, -(10**5000)]),
    st.sampled_from([lambda n: n, lambda n: [0.5, "a", n], lambda n: {"a": (n,)}]),
)
def test_integers_are_those_that_json_writes(number: int, wrap: Callable[[int], Any]) -> None:
    value, fits = wrap(number), abs(number) < 10**4300
    checks: list[tuple[Callable[[], object], type[ValueError]]] = [
        (partial(check_bounds, value, "state"), InvalidMessageError),
        (partial(check_messages, [called(input={"a": value})]), InvalidMessageError),
        (partial(check_messages, [returned({"json": value})]), UnsupportedContentError),
    ]
    for check, error in checks:
        if fits:
            check()
        else:
            with pytest.raises(error, match=f"{number.bit_length()} bits.*4300 digits"):
                check()


def test_bounds_are_of_any_value() -> None:
    check_bounds([object(), {1: float("nan")}, "a" * 1000, b"a", None], "state")


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
