"""Histories are found by content: a match is the longest known beginning, with or without a hint."""

from __future__ import annotations

import hashlib
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from support.drafts import make_draft
from tito_core.ledger import Ledger, check_ledger
from tito_core.ledger.history import extended, extended_in_pieces, strict

OPENINGS = ({"system": None}, {"system": "Be brief."})


def user(number: float) -> dict[str, Any]:
    return {"role": "user", "content": [{"text": "n"}, {"json": number}]}


def assistant(number: float) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"text": str(number)}]}


def answered(ledger: Ledger, history: list[Any], answer: Any, after: int | None = None) -> int:
    """Commit an answer to a history, as a child of the latest turn on its match."""
    match = ledger.match(history, after)
    parent = next((max(node.turns) for node in match.node.upward() if node.turns), None)
    start = ledger.path_length(parent)
    draft = make_draft(parent, start, [100], [200], fingerprint=extended(match.digest, answer))
    return ledger.commit(draft, match, answer).index


MESSAGES = st.sampled_from([user(0), user(1), user(1.0), user(True), assistant(0), assistant(1)])
HISTORIES = st.tuples(st.sampled_from(OPENINGS), st.lists(MESSAGES, min_size=1, max_size=5)).map(
    lambda parts: [parts[0], *parts[1]]
)


def prefixes(histories: list[list[Any]]) -> set[str]:
    """Return the repr of every beginning of every history."""
    return {repr(history[:stop]) for history in histories for stop in range(len(history) + 1)}


@settings(max_examples=40)
@given(data=st.data())
def test_a_match_is_the_longest_known_beginning(data: st.DataObject) -> None:
    ledger = Ledger()
    known: list[list[Any]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        grown = st.sampled_from(known).map(lambda history: [*history, user(0)]) if known else HISTORIES
        history = data.draw(st.one_of(HISTORIES, grown))
        answer = data.draw(st.sampled_from([assistant(0), assistant(1)]))
        turn = answered(ledger, history, answer, data.draw(st.none() | st.integers(0, 6)))
        known.append([*history, answer])
        assert turn in ledger.match(known[-1]).node.turns
    check_ledger(ledger)
    beginnings = prefixes(known)
    history = data.draw(
        st.one_of(HISTORIES, st.sampled_from(known).map(lambda history: [*history, assistant(1), user(1)]))
    )
    plain = ledger.match(history)
    assert plain.known == max(stop for stop in range(len(history) + 1) if repr(history[:stop]) in beginnings)
    assert list(plain.new) == history[plain.known :]
    assert plain.node.turns == [i for i, each in enumerate(known) if repr(each) == repr(history[: plain.known])]
    for after in range(-1, len(ledger) + 1):
        hinted = ledger.match(history, after)
        assert (hinted.node, hinted.known, hinted.digest) == (plain.node, plain.known, plain.digest)
        assert hinted.digests == plain.digests


class Counted(str):
    """A string that counts comparisons of its characters; comparisons by identity do not call `__eq__`."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


def test_adopted_strings_are_compared_by_identity() -> None:
    ledger = Ledger()
    question = {"role": "user", "content": [{"text": Counted("Why?")}]}
    turn = answered(ledger, [OPENINGS[0], question], {"role": "assistant", "content": [{"text": "Because."}]})
    stored = Counted("Because.")
    answer = {"role": "assistant", "content": [{"text": stored}]}
    ledger.adopt(turn, answer)
    node = ledger.node_of(turn)
    assert node is not None
    assert node.message["content"][0]["text"] is stored
    Counted.compared = 0
    for after in (None, turn):
        assert ledger.match([OPENINGS[0], question, answer], after).node is node
    assert Counted.compared == 0
    answered(ledger, [OPENINGS[0], question, answer, user(1)], assistant(1))
    ledger.adopt(turn, {"role": "assistant", "content": [{"text": "Because."}]})
    assert node.message["content"][0]["text"] is stored, "a node with children keeps its message"
    ledger.adopt(99, answer)


def test_with_a_hint_other_paths_are_not_compared() -> None:
    ledger = Ledger()
    mine = {"role": "user", "content": [{"text": Counted("Mine?")}]}
    other = {"role": "user", "content": [{"text": Counted("Other?")}]}
    turn = answered(ledger, [OPENINGS[0], mine], assistant(0))
    answered(ledger, [OPENINGS[0], other], assistant(0))
    for hint, is_compared in ((None, True), (turn, False)):
        Counted.compared = 0
        assert ledger.match([OPENINGS[0], mine, assistant(0)], hint).node is ledger.node_of(turn)
        assert (Counted.compared > 0) is is_compared


def test_retained_returns_every_message_that_is_held() -> None:
    ledger = Ledger()
    answered(ledger, [OPENINGS[0], user(0)], assistant(0))
    answered(ledger, [OPENINGS[0], user(1)], assistant(1))
    kept = ledger.retained()
    assert len(kept) == 5
    for message in (OPENINGS[0], user(0), assistant(0), user(1), assistant(1)):
        assert any(item == message for item in kept)


def test_a_tuple_is_matched_and_has_the_digest_of_a_list() -> None:
    ledger = Ledger()
    question = {"role": "user", "content": [{"json": {"a": (1, (2, "b"))}}]}
    turn = answered(ledger, [{"enum": ("a", 1)}, question], assistant(0))
    for hint in (None, turn):
        match = ledger.match([{"enum": ("a", 1)}, question, assistant(0)], hint)
        assert match.node is ledger.node_of(turn)
    assert extended(b"", {"a": (1, 2)}) == extended(b"", {"a": [1, 2]})
    assert ledger.match([{"enum": ("a", True)}, question]).known == 0


def test_the_newest_of_several_answers_is_compared_first() -> None:
    ledger = Ledger()
    first, second, third = (answered(ledger, [OPENINGS[0], user(0)], assistant(number)) for number in range(3))
    question = ledger.match([OPENINGS[0], user(0)]).node
    assert question.children == [ledger.node_of(turn) for turn in (third, second, first)]


def test_bytes_keys_of_several_types_and_other_values_have_a_digest() -> None:
    mixed, strings = {"a": {1: "x", "b": (2, {3: 4, "c": 5})}}, {"a": {"1": "x", "b": [2, {"3": 4, "c": 5}]}}
    assert extended(b"", mixed) == extended(b"", strings)
    picture = {"role": "user", "content": [{"image": {"bytes": b"png"}}]}
    other = {"role": "user", "content": [{"image": {"bytes": b"PNG"}}]}
    assert extended(b"", picture) == extended(b"", {"content": [{"image": {"bytes": b"png"}}], "role": "user"})
    assert extended(b"", picture) != extended(b"", other)
    assert extended(b"", picture) != extended(b"x", picture)
    assert extended(b"", {"a": {1}}) != extended(b"", {"a": {2}})
    assert extended(b"", {"a": "é"}) != extended(b"", {"a": "e"})
    digest = hashlib.sha256(b"png").hexdigest()
    assert extended(b"", {"bytes": b"png"}) == extended(b"", {"bytes": f"sha256:{digest}"})
    expected = hashlib.blake2b(b'{"a": "\\u00e9", "b": 1}', key=b"so far", digest_size=16).digest()
    assert extended(b"so far", {"b": 1, "a": "é"}) == expected, "files hold these digests"


KEYS = st.text(max_size=3) | st.integers(0, 12) | st.none()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(message=JSON, size=st.integers(1, 4))
def test_a_digest_is_the_same_of_a_strict_copy_and_in_pieces(message: Any, size: int) -> None:
    expected = extended(b"so far", message)
    assert extended(b"so far", strict(message)) == expected
    with patch("tito_core.ledger.history.PIECE", size):
        assert extended_in_pieces(b"so far", strict(message)) == expected
