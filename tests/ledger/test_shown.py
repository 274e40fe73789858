"""What a ledger, a trajectory, a branch and an error show: one line, or the drawing of a forest."""

from __future__ import annotations

import pytest

from support.drafts import make_draft
from support.refusals import breaks_law
from tito_core.ledger import Branch, CallRecord, Finish, LawViolationError, Ledger, Reason
from tito_core.ledger.laws import SHOWN_IDS, SHOWN_TEXT, check_same_ids

UUID = "00000000-0000-4000-8000-000000000000"


class OwnError(LawViolationError):
    """An error of a user's package."""


def test_a_ledger_counts_its_turns_leaves_and_tokens_and_names_its_task() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1, 2], [3]))
    assert repr(ledger) == f"<Ledger {ledger.uuid}: 1 turn, 1 leaf, 3 tokens, 1 sampled>"
    ledger.commit(make_draft(0, 3, [4], [5, 6]))
    ledger.commit(make_draft(0, 3, [4], [7], constrained=True))
    assert repr(ledger) == f"<Ledger {ledger.uuid}: 3 turns, 2 leaves, 8 tokens, 4 sampled>"
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


def grown(parents: list[int | None]) -> Ledger:
    ledger = Ledger(UUID)
    for index, parent in enumerate(parents):
        ledger.commit(make_draft(parent, ledger.path_length(parent), [100] * (index + 1), [200]))
    return ledger


def test_an_empty_ledger_is_a_title_and_a_chain_has_one_connector() -> None:
    assert Ledger(UUID).tree() == f"ledger {UUID}: 0 turns, 0 trajectories, 0 tokens, 0 of them sampled"
    assert grown([None, 0, 1]).tree().splitlines() == [
        f"ledger {UUID}: 3 turns, 1 trajectory, 9 tokens, 3 of them sampled",
        "└─ turn 0  1+1 tokens  stop",
        "   turn 1  2+1 tokens  stop",
        "   turn 2  3+1 tokens  stop",
    ]


def test_forks_and_several_roots_are_indented() -> None:
    assert grown([None, 0, 1, 1, 0, None, 5, 3]).tree().splitlines() == [
        f"ledger {UUID}: 8 turns, 4 trajectories, 44 tokens, 8 of them sampled",
        "├─ turn 0  1+1 tokens  stop",
        "│  ├─ turn 1  2+1 tokens  stop",
        "│  │  ├─ turn 2  3+1 tokens  stop",
        "│  │  └─ turn 3  4+1 tokens  stop  ← separate agent, from turn 1",
        "│  │     turn 7  8+1 tokens  stop",
        "│  └─ turn 4  5+1 tokens  stop  ← separate agent, from turn 0",
        "└─ turn 5  6+1 tokens  stop  ← separate agent",
        "   turn 6  7+1 tokens  stop",
    ]


def test_a_line_shows_finish_calls_reasoning_and_grammar() -> None:
    ledger = Ledger(UUID)
    calls = CallRecord("look", "ok", 0, 1), CallRecord(None, "truncated", 1, 2, "cut")
    calls += (CallRecord("look\nturn 9", "malformed", 0, 1),)
    changes = {"finish": Finish.LENGTH, "calls": calls, "reasoning_closed": False, "constrained": True}
    ledger.commit(make_draft(None, 0, [100], [200, 201], **changes))
    assert ledger.tree().splitlines() == [
        f"ledger {UUID}: 1 turn, 1 trajectory, 3 tokens, 2 of them sampled",
        r"└─ turn 0  1+2 tokens  length  calls look, ? (truncated), 'look\nturn 9' (malformed)  "
        "reasoning left open  constrained",
    ]


@pytest.mark.parametrize(
    ("branch", "text"),
    [
        (Branch(Reason.SIDE_CALL), "side call"),
        (Branch(Reason.RETRY, 0), "retry, from turn 0"),
        (Branch(Reason.EDIT, None, 0), "edit, at message 0"),
        (Branch(Reason.TRIM, 3, 4), "trim, from turn 3, at message 4"),
        (Branch(Reason.OPENING, 1, detail="tools"), "new system prompt or tools (tools), from turn 1"),
    ],
)
def test_the_text_of_a_branch(branch: Branch, text: str) -> None:
    assert str(branch) == text
