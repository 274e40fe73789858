"""The drawing of a ledger and the text of a branch, character by character."""

from __future__ import annotations

import pytest

from support.drafts import make_draft
from tito_core.ledger import Branch, CallRecord, Finish, Ledger, Reason

UUID = "00000000-0000-4000-8000-000000000000"


def grown(parents: list[int | None]) -> Ledger:
    ledger = Ledger(UUID)
    for index, parent in enumerate(parents):
        ledger.commit(make_draft(parent, ledger.path_length(parent), [100] * (index + 1), [200]))
    return ledger


def test_an_empty_ledger_is_a_title() -> None:
    assert Ledger(UUID).tree() == f"ledger {UUID}: 0 turns, 0 trajectories, 0 tokens, 0 of them sampled"


def test_a_chain_has_one_connector() -> None:
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
    calls = (CallRecord("look", "ok", 0, 1), CallRecord(None, "truncated", 1, 2, "cut"))
    changes = {"finish": Finish.LENGTH, "calls": calls, "reasoning_closed": False, "constrained": True}
    ledger.commit(make_draft(None, 0, [100], [200, 201], **changes))
    assert ledger.tree().splitlines() == [
        f"ledger {UUID}: 1 turn, 1 trajectory, 3 tokens, 2 of them sampled",
        "└─ turn 0  1+2 tokens  length  calls look, ? (truncated)  reasoning left open  constrained",
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
