"""The text of a prompt: what is sent and what comes back is the ids', however they were put together."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tito_core.backend.id_text import PARTS, IdText

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
turns = st.lists(ids, max_size=2 * PARTS)


def written(parts: list[list[int]]) -> IdText:
    text = IdText()
    for part in parts:
        text = text.then(np.array(part, np.int32))
    return text


@given(turns)
def test_a_body_holds_the_fields_and_all_ids(parts: list[list[int]]) -> None:
    text, whole = written(parts), [token for part in parts for token in part]
    assert text.length == len(whole)
    assert json.loads(text.body({"stream": False, "rid": 'a"b'}, "ids")) == {
        "stream": False,
        "rid": 'a"b',
        "ids": whole,
    }


@given(turns, ids, st.data())
def test_an_echo_is_recognised_just_when_it_is_the_same_list(
    parts: list[list[int]], more: list[int], data: st.DataObject
) -> None:
    text, whole = written(parts), [token for part in parts for token in part]
    same = json.dumps(whole, separators=(",", ":")).encode()
    assert text.is_echoed_in(memoryview(same))
    cut = data.draw(st.integers(0, len(same) - 1))
    changed = bytearray(same)
    changed[cut] ^= 1
    assert not text.is_echoed_in(memoryview(same[:cut]))
    assert not text.is_echoed_in(memoryview(bytes(changed)))
    if more:
        assert not text.is_echoed_in(memoryview(json.dumps(whole + more, separators=(",", ":")).encode()))


@given(turns, ids, ids)
def test_texts_that_share_their_beginning_do_not_touch_each_other(
    parts: list[list[int]], one: list[int], other: list[int]
) -> None:
    begun, whole = written(parts), [token for part in parts for token in part]
    first, second = begun.then(np.array(one, np.int32)), begun.then(np.array(other, np.int32))
    for text, expected in ((first, whole + one), (second, whole + other), (begun, whole)):
        assert json.loads(text.body({"n": 1}, "ids"))["ids"] == expected


def test_what_an_answer_left_out_is_no_echo() -> None:
    for nothing in (b"null", b"", b"[", b"{}"):
        assert not IdText().is_echoed_in(memoryview(nothing))
