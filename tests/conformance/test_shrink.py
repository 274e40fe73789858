"""Conversations: shrinking keeps the moves that break the check; calls are drawn so that their order shows."""

from __future__ import annotations

import json
from contextlib import suppress

import jsonschema
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tito_conformance.agents import TOOLS
from tito_conformance.checks import BrokenLawError
from tito_conformance.generation import MAX_TRIES, Failure, calls, shrink_moves
from tito_conformance.testing import strategies
from tito_conformance.testing.moves import Ask, Call, Cancel, Cut, Edit, Force, Move

pytestmark = pytest.mark.suite

CONVERSATIONS = st.lists(strategies.moves(), min_size=1, max_size=16).map(tuple)


@settings(max_examples=25, deadline=None)
@given(CONVERSATIONS, st.data())
def test_only_the_needed_moves_stay_in_order(moves: tuple[Move, ...], data: st.DataObject) -> None:
    needed = sorted(data.draw(st.sets(st.integers(0, len(moves) - 1), min_size=1, max_size=3)))
    kinds = [type(moves[at]) for at in needed]
    tried = []

    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        tried.append(candidate)
        rest = iter([type(move) for move in candidate])
        return BrokenLawError("answers", str(len(candidate))) if all(kind in rest for kind in kinds) else None

    first = BrokenLawError("answers", "first")
    *_, (broken, found) = [(first, moves), *shrink_moves(first, moves, play, tries=1000)]
    assert found == tuple(kind() for kind in kinds), "each with default values"
    assert moves not in tried
    assert found == moves or broken.problem == str(len(found))


def test_a_conversation_that_breaks_another_check_is_not_smaller() -> None:
    moves = (Ask(text="one"), Cut(), Edit())

    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        return BrokenLawError("prompt", "other")

    assert not list(shrink_moves(BrokenLawError("answers", "first"), moves, play))


def test_the_number_of_tries_is_limited() -> None:
    tried = []

    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        tried.append(candidate)
        return None

    list(shrink_moves(BrokenLawError("answers", "first"), tuple(Force(text=str(n)) for n in range(40)), play))
    assert len(tried) == MAX_TRIES


def test_a_conversation_that_breaks_the_check_by_chance_is_not_smaller() -> None:
    played: list[tuple[Move, ...]] = []

    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        played.append(candidate)
        return BrokenLawError("answers", "chance") if played.count(candidate) == 1 else None

    assert not list(shrink_moves(BrokenLawError("answers", "first"), (Ask(text="one"), Cut(), Edit()), play))


def test_moves_that_race_the_clock_are_left_out_where_the_others_break_it_too() -> None:
    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        return BrokenLawError("answers", "any turn")

    moves = (Cancel(), Ask(text="one"))
    *_, (_, found) = shrink_moves(BrokenLawError("answers", "first"), moves, play)
    assert found == (Ask(),)
    assert Failure(ValueError(), moves[1:]).size() < Failure(ValueError(), moves[:1]).size()


def test_a_policy_is_often_made_to_write_calls_whose_order_shows() -> None:
    """A standard run of 372 turns met no two different valid calls, and so missed a client that reversed them."""
    schemas = {tool["name"]: tool["inputSchema"]["json"] for tool in TOOLS}
    ordered = 0

    @seed(1)
    @settings(max_examples=200, database=None, deadline=None, phases=[Phase.generate])
    @given(calls())
    def draw(move: Call) -> None:
        nonlocal ordered
        valid = set()
        for body in move.calls:
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                call = json.loads(body)
                if jsonschema.Draft202012Validator(schemas.get(call["name"], {})).is_valid(call["arguments"]):
                    valid.add(body)
        ordered += len(valid) > 1

    draw()
    assert ordered >= 20, ordered
