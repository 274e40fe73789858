"""Making a conversation smaller: it keeps what breaks the check, and lets the rest go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.conformance.generation import MAX_TRIES, shrink_moves
from strands_tito.conformance.laws import BrokenLawError
from strands_tito.testing import strategies
from strands_tito.testing.moves import Ask, Cut, Edit, Force, Move

DRAWN = st.lists(strategies.moves(), min_size=1, max_size=16).map(tuple)


@settings(max_examples=60, deadline=None)
@given(DRAWN, st.data())
def test_what_is_needed_stays_in_order_and_nothing_else(moves: tuple[Move, ...], data: st.DataObject) -> None:
    needed = sorted(data.draw(st.sets(st.integers(0, len(moves) - 1), min_size=1, max_size=3)))
    kinds = [type(moves[at]) for at in needed]
    tried = []

    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        tried.append(candidate)
        left = iter([type(move) for move in candidate])
        return BrokenLawError("echo", str(len(candidate))) if all(kind in left for kind in kinds) else None

    first = BrokenLawError("echo", "first")
    *_, (broken, found) = [(first, moves), *shrink_moves(first, moves, play, tries=1000)]
    assert found == tuple(kind() for kind in kinds), "each as plain as it can be"
    assert moves not in tried
    assert found == moves or broken.problem == str(len(found))


def test_another_check_shows_nothing_smaller() -> None:
    moves = (Ask(text="one"), Cut(), Edit())

    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        return BrokenLawError("usage", "other")

    assert not list(shrink_moves(BrokenLawError("echo", "first"), moves, play))


def test_it_tries_so_often_and_no_more() -> None:
    tried = []

    def play(candidate: tuple[Move, ...]) -> BrokenLawError | None:
        tried.append(candidate)
        return None

    list(shrink_moves(BrokenLawError("echo", "first"), tuple(Force(text=str(n)) for n in range(40)), play))
    assert len(tried) == MAX_TRIES
