"""`IdText`: request bodies and echoes equal the ids, however the text was built."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import PROMPT, WIRES, Kind, Waits, backend_of, bodies, engine_of, request_of
from tito_conformance.testing import UNAVAILABLE, ScriptedServer
from tito_core.backend import BadRequestError
from tito_core.backend.generate import generate
from tito_core.backend.id_text import PIECE_BYTES, SAME_ECHO, IdText, in_pieces

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
turns = st.lists(ids, max_size=128)


LARGE = st.sampled_from([1, 3, 5_461, PIECE_BYTES // 6, PIECE_BYTES // 5, 2 * PIECE_BYTES // 5, 500_000])
"""Numbers of ids of five digits: whose text is joined, left alone, or cut."""


def body_of(text: IdText) -> bytes:
    body = text.body({"n": 1}, "ids")
    return body if isinstance(body, bytes) else b"".join(body)


def written(parts: list[list[int]]) -> IdText:
    text = IdText()
    for part in parts:
        text = text.then(np.array(part, np.int32))
    return text


@settings(max_examples=40)
@given(turns)
def test_a_body_holds_the_fields_and_all_ids(parts: list[list[int]]) -> None:
    text, whole = written(parts), [token for part in parts for token in part]
    assert text.length == len(whole)
    body = text.body({"stream": False, "rid": 'a"b'}, "ids")
    assert isinstance(body, bytes), "nothing of it is large"
    assert json.loads(body) == {"stream": False, "rid": 'a"b', "ids": whole}


@given(st.lists(LARGE, max_size=128))
@settings(max_examples=8)
def test_large_parts_are_sent_in_pieces_without_copies(lengths: list[int]) -> None:
    text, whole = IdText(), 0
    for number in lengths:
        text, whole = text.then(np.full(number, 12345, np.int32)), whole + number
    body = text.body({"n": 1}, "ids")
    pieces = (body,) if isinstance(body, bytes) else body
    assert b"".join(pieces) == b'{"n":1,"ids":[' + b",".join([b"12345"] * whole) + b"]}"
    assert max(map(len, pieces)) <= PIECE_BYTES
    kept = {id(part): 0 for part in text._parts if len(part) >= PIECE_BYTES}
    for piece in pieces:
        if isinstance(piece, memoryview):
            kept[id(piece.obj)] += len(piece)
    assert kept == {id(part): len(part) for part in text._parts if len(part) >= PIECE_BYTES}, "no copy, each byte once"


@pytest.mark.parametrize("kind", WIRES)
async def test_a_prompt_in_pieces_arrives_whole_also_on_a_retry(kind: Kind) -> None:
    prompt = [3 + n * 7919 % 900 for n in range(100_000)]
    tries = iter([UNAVAILABLE, None])
    engine = engine_of(kind, fault=lambda number, request: next(tries, None), max_model_len=10**6)
    async with ScriptedServer(engine) as server:
        backend = type(backend_of(engine))(server.base_url, sleep=Waits())
        text = written([prompt[:3], prompt[3:75_000], prompt[75_000:75_010], prompt[75_010:]])
        response = await generate(backend, replace(request_of(prompt), id_text=text))
        await backend.aclose()
    assert response.prompt_length == len(prompt)
    long = [body for body in bodies(engine) if len(str(body)) > 10_000]
    names = {"sglang": "input_ids", "vllm": "token_ids", "vllm-completions": "prompt"}
    assert [body[names[kind]] for body in long] == [prompt] * 2, "once refused, once taken"


@settings(max_examples=40)
@given(turns, ids, st.data())
def test_an_echo_matches_only_the_same_list(parts: list[list[int]], more: list[int], data: st.DataObject) -> None:
    text, whole = written(parts), [token for part in parts for token in part]
    same = json.dumps(whole, separators=(",", ":")).encode()
    assert text.is_echoed_in(same)
    cut = data.draw(st.integers(0, len(same) - 1))
    changed = bytearray(same)
    changed[cut] ^= 1
    assert not text.is_echoed_in(same[:cut])
    assert not text.is_echoed_in(bytes(changed))
    if more:
        assert not text.is_echoed_in(json.dumps(whole + more, separators=(",", ":")).encode())


@settings(max_examples=40)
@given(turns, ids, ids)
def test_texts_that_share_a_beginning_are_independent(parts: list[list[int]], one: list[int], other: list[int]) -> None:
    begun, whole = written(parts), [token for part in parts for token in part]
    first, second = begun.then(np.array(one, np.int32)), begun.then(np.array(other, np.int32))
    for text, expected in ((first, whole + one), (second, whole + other), (begun, whole)):
        assert json.loads(body_of(text))["ids"] == expected


@settings(max_examples=40)
@given(turns, st.data())
def test_a_text_matches_only_its_own_ids(parts: list[list[int]], data: st.DataObject) -> None:
    text, whole = written(parts), [token for part in parts for token in part]
    assert text.matches(np.array(whole, np.int32))
    assert not text.matches(np.array([*whole, 0], np.int32))
    if whole:
        at = data.draw(st.integers(0, len(whole) - 1))
        other = [*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]
        assert not text.matches(np.array(other, np.int32))
        assert not text.matches(np.array(whole[:-1], np.int32))


@settings(max_examples=40)
@given(turns, ids, ids)
def test_a_text_continues_another_only_with_the_added_ids(
    parts: list[list[int]], more: list[int], other: list[int]
) -> None:
    before, added = written(parts), np.array(more, np.int32)
    whole = before.then(added)
    assert whole.continues(before, added)
    assert whole.continues(before, np.array(other, np.int32)) is (more == other)
    assert not whole.continues(before.then(np.array([5], np.int32)), added)


def test_a_text_bound_to_an_array_makes_it_read_only() -> None:
    own, equal = np.array([1, 2], np.int32), np.array([1, 2], np.int32)
    text = IdText.of(own).for_array(own)
    assert text.matches(own)
    assert text.matches(equal)
    assert not text.matches(np.array([1, 3], np.int32))
    assert text.then(equal)._array is None
    with pytest.raises(ValueError, match="read-only"):
        own[0] = 5


@pytest.mark.parametrize("kind", WIRES)
async def test_the_text_of_another_prompt_is_not_sent(kind: Kind) -> None:
    engine = engine_of(kind)
    backend = backend_of(engine)
    wrong = IdText.of(np.array([*PROMPT[:-1], 99], np.int32))
    with pytest.raises(BadRequestError, match=r"Law 4: .*cached text"):
        await generate(backend, replace(request_of(), id_text=wrong))
    assert not engine.requests


def test_a_missing_echo_is_not_an_echo() -> None:
    for nothing in (b"null", b"", b"[", b"{}"):
        assert not IdText().is_echoed_in(nothing)


@settings(max_examples=40)
@given(turns, ids, st.text(), st.booleans(), st.booleans())
def test_an_equal_echo_is_replaced_and_any_other_is_kept(
    parts: list[list[int]], other: list[int], answer_text: str, nested: bool, blank: bool
) -> None:
    text, whole = written(parts), [token for part in parts for token in part]
    marker = json.loads(bytes(SAME_ECHO))
    for echoed in (whole, other, None, [*whole, 7], whole[:-1]):
        inner = {"prompt_token_ids": echoed, "logprobs": [-0.5]}
        fields = {
            "text": answer_text + '"prompt_token_ids":[1]',
            **({"choices": [inner]} if nested else inner),
            "prompt": whole,
        }
        answer = json.dumps(fields, separators=(", ", ": ") if blank else (",", ":")).encode()
        found = json.loads(text.without_echo(answer))
        holder = found["choices"][0] if nested else found
        assert holder["prompt_token_ids"] == (marker if echoed == whole and not blank else echoed)
        holder["prompt_token_ids"] = echoed
        assert found == fields


def test_an_answer_without_a_whole_echo_is_unchanged() -> None:
    text = IdText.of(np.array([1, 22], np.int32))
    for answer in (
        b"",
        b"<html>",
        b'{"prompt_token_ids":',
        b'{"prompt_token_ids":[1,22',
        b'{"prompt_token_ids":[1,222]}',
    ):
        assert text.without_echo(answer) == answer


@pytest.mark.parametrize("length", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_large_body_is_cut_without_a_copy(length: int) -> None:
    body = bytes(length)
    found = in_pieces(body)
    if length <= PIECE_BYTES:
        assert found is body
    else:
        assert isinstance(found, tuple)
        assert max(map(len, found)) <= PIECE_BYTES
        assert all(isinstance(piece, memoryview) and piece.obj is body for piece in found)
        assert b"".join(found) == body
        assert in_pieces(found) is found
