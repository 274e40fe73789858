"""Ends of turns: missing closers, and positions of control tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tito_core.chat.ending import (
    Ending,
    Opened,
    adjacent,
    content_spans,
    content_start,
    cut,
    find_run,
    run_before,
    stops_of,
)
from tito_core.chat.traced import Traced


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


TWO = Ending((7, 8), frozenset({9}), frozenset(), {Opened.MESSAGE: ids(1, 7, 8), Opened.REASONING: ids(2, 3, 7, 8)})
NONE = Ending((), frozenset(), frozenset({4, 5}), {Opened.MESSAGE: ids(), Opened.CALL: ids(6)})


@pytest.mark.parametrize(
    ("ending", "last", "opened", "missing"),
    [
        (TWO, None, Opened.MESSAGE, [1, 7, 8]),
        (TWO, 1, Opened.MESSAGE, [1, 7, 8]),
        (TWO, 7, Opened.MESSAGE, [8]),
        (TWO, 8, Opened.MESSAGE, []),
        (TWO, 9, Opened.MESSAGE, []),
        (TWO, None, Opened.REASONING, [2, 3, 7, 8]),
        (TWO, 7, Opened.REASONING, [8]),
        (TWO, 8, Opened.REASONING, []),
        (TWO, None, Opened.CALL, [1, 7, 8]),
        (NONE, None, Opened.MESSAGE, []),
        (NONE, 4, Opened.CALL, [6]),
        (NONE, None, Opened.CALL, [6]),
    ],
)
def test_missing_closers(ending: Ending, last: int | None, opened: Opened, missing: list[int]) -> None:
    assert ending.missing(last, opened).tolist() == missing


def test_stops() -> None:
    assert TWO.stops == {8, 9}
    assert NONE.stops == {4, 5}
    none: frozenset[int] = frozenset()
    assert stops_of([TWO, NONE], none) == (8, 4, 5, 9)
    assert stops_of([NONE], none) == (4, 5)


@pytest.mark.parametrize(
    ("inner", "stops"),
    [
        ({8}, (9, 4, 5)),  # the usual one closes parts too: the last answer's own end comes first
        ({8, 9}, (4, 5)),
        ({4}, (8, 5, 9)),
        ({7, 1}, (8, 4, 5, 9)),
        ({4, 5, 8, 9}, ()),
    ],
)
def test_a_token_that_closes_a_part_of_a_turn_is_not_a_stop(inner: set[int], stops: tuple[int, ...]) -> None:
    assert stops_of([TWO, NONE], frozenset(inner)) == stops


CONTROLS = [(0, 1, 7), (1, 2, 8), (4, 5, 7), (5, 6, 8), (6, 7, 9)]


@pytest.mark.parametrize(
    ("wanted", "start", "found"),
    [
        ((7,), 0, (0, 1)),
        ((7,), 1, (4, 5)),
        ((7, 8), 1, (4, 6)),
        ((8, 9), 0, (5, 7)),
        ((7, 9), 0, None),
        ((9,), 7, None),
        ((7, 8, 9, 9), 0, None),
    ],
)
def test_runs(wanted: tuple[int, ...], start: int, found: tuple[int, int] | None) -> None:
    assert find_run(CONTROLS, wanted, start) == found


def test_adjacent_tokens() -> None:
    assert adjacent(CONTROLS) == (7, 8)
    assert adjacent(CONTROLS[2:]) == (7, 8, 9)
    assert adjacent([]) == ()


@pytest.mark.parametrize(
    ("text", "start", "stop", "begins"),
    [
        ('"}\n<c>E', 0, 6, 2),
        ('"}<c>\n<c>E', 0, 9, 2),
        ("x<c>y<c>E", 0, 8, 5),
        ("x<c>y E", 0, 6, 6),
        ("x \n<c>E", 2, 6, 2),
    ],
)
def test_a_run_before_a_place(text: str, start: int, stop: int, begins: int) -> None:
    controls = [(i, i + 3, 1) for i in range(len(text)) if text.startswith("<c>", i)]
    assert run_before(controls, Traced.of(text, ()), start, stop) == begins


def test_content() -> None:
    text = Traced.of("abcdef", [(1, 2, 0), (2, 4, 5), (5, 6, 0)])
    assert content_spans(text, 0) == [(1, 2, 0), (5, 6, 0)]
    assert (content_start(text, 5), content_start(text, 9)) == (2, 6)
    assert cut(text, 2).spans == ((0, 2, 5), (3, 4, 0))
    assert cut(text, 0, 1).spans == ()
