"""The text of an answer is what its ids decode to, apart from what a decoder may withhold."""

from __future__ import annotations

from typing import Any

import pytest

from tito_conformance.oracle import check_text
from tito_conformance.wire import WireGeneration

LETTERS = {1: "Hello", 2: " you", 3: "</s>", 4: "\N{REPLACEMENT CHARACTER}"}


@pytest.mark.parametrize(
    ("ids", "text", "finish", "stop", "sound"),
    [
        ([1, 2], "Hello you", "length", (), True),
        ([1, 2], "Hello", "length", (), False),
        ([1, 2], "", "length", (), False),
        ([1, 2], "Hell", "stop", (), False),
        ([1, 2, 3], "Hello you", "stop", (), True),
        ([1, 2, 3], "Hello you", "length", (), False),
        ([1, 2, 3], "", "stop", (), False),
        ([1, 2, 4], "Hello you", "length", (), True),
        ([1, 2], "Hello yo", "stop", ("u",), True),
        ([1, 2], "Hello yo", "stop", ("yo",), True),
        ([1, 2], "Hello ", "stop", ("yo",), True),
        ([1, 2], "Hell", "stop", ("yo",), False),
        ([1, 2], "Hell", "abort", (), True),
        ([1, 2], "other", "abort", (), False),
        ([], "", "length", (), True),
    ],
)
def test_only_the_stop_and_an_incomplete_character_may_lack(
    ids: list[int], text: str, finish: str, stop: tuple[str, ...], sound: bool
) -> None:
    sampling: dict[str, Any] = {"stop": list(stop)}
    answer = WireGeneration("r", [], sampling, output_ids=ids, finish=finish, text=text)
    assert (list(check_text([answer], lambda ids: "".join(LETTERS[each] for each in ids))) == []) is sound
