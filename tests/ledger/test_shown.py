"""What a ledger, a trajectory and an error show in one line."""

from __future__ import annotations

import pytest

from support.drafts import make_draft
from support.refusals import breaks_law
from tito_core.ledger import LawViolationError, Ledger
from tito_core.ledger.laws import SHOWN_IDS, SHOWN_TEXT, check_same_ids


class OwnError(LawViolationError):
    """An error of a user's package."""


def test_a_ledger_counts_its_turns_leaves_and_tokens() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1, 2], [3]))
    assert repr(ledger) == f"<Ledger {ledger.uuid}: 1 turn, 1 leaf, 3 tokens, 1 sampled>"
    ledger.commit(make_draft(0, 3, [4], [5, 6]))
    ledger.commit(make_draft(0, 3, [4], [7], constrained=True))
    assert repr(ledger) == f"<Ledger {ledger.uuid}: 3 turns, 2 leaves, 8 tokens, 4 sampled>"


def test_a_ledger_names_its_task() -> None:
    ledger = Ledger(task_id="gsm 7")
    assert repr(ledger) == f"<Ledger {ledger.uuid}, task 'gsm 7': 0 turns, 0 leaves, 0 tokens, 0 sampled>"


def test_a_trajectory_counts_its_turns_and_tokens() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1, 2], [3]))
    assert repr(ledger.trajectories()[0]) == "<Trajectory: 1 turn, 3 tokens, 1 sampled, 1 trained here>"
    ledger.commit(make_draft(0, 3, [4], [5, 6]))
    ledger.commit(make_draft(0, 3, [4], [7, 8], constrained=True))
    assert list(map(repr, ledger.trajectories())) == [
        "<Trajectory: 2 turns, 6 tokens, 3 sampled, 3 trained here>",
        "<Trajectory: 2 turns, 6 tokens, 3 sampled, 0 trained here>",
    ]


@pytest.mark.parametrize("kind", [LawViolationError, OwnError])
def test_an_error_names_its_place_in_the_documentation_or_that_of_the_error_it_extends(kind: type[Exception]) -> None:
    assert kind(4, "x").__notes__ == ["docs: errors.md#lawviolationerror"]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_an_error_shows_so_much_of_a_text_and_so_many_ids(more: int) -> None:
    text, ids = "b" * (SHOWN_TEXT + more), list(range(SHOWN_IDS + more))
    with breaks_law(15, *(["b...'", "7, ...]"] if more == 1 else ["b'", f"{ids[-1]}]"])):
        check_same_ids(text, ids, [], tokenizer="mine", server="the server")
