"""Examples: what a ledger commits, what it refuses, and what stays unchanged."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.drafts import make_draft
from tito_core.ledger import Column, Ledger, Sampling


def test_a_draft_copies_its_arrays_and_all_columns_are_read_only() -> None:
    output = np.array([200, 201], np.int32)
    draft = make_draft(None, 0, [100, 101], [0, 0], output_ids=output)
    output[0] = 299
    ledger = Ledger()
    turn = ledger.commit(draft)
    assert turn.draft.output_ids.tolist() == [200, 201]
    columns = turn.draft.columns
    views = (columns.ids, columns.prompt_ids, columns.output_ids, columns.logprobs, columns.prompt_provenance)
    assert not any(view.flags.writeable for view in views)
    trajectory = ledger.trajectories()[0]
    assert not any(
        column.flags.writeable
        for column in (trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs, trajectory.provenance)
    )


def test_a_committed_turn_does_not_change_with_the_callers_own_values() -> None:
    parameters: dict[str, Any] = {"temperature": 1.0, "stop": ["a"]}
    extras = {"routed_experts": Column.of(0, [[1]])}
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], sampling=Sampling(parameters), extras=extras))
    parameters["temperature"] = 2.0
    parameters["stop"].append("b")
    extras.clear()
    assert dict(ledger[0].draft.sampling) == {"temperature": 1.0, "stop": ["a"]}
    assert list(ledger[0].draft.extras) == ["routed_experts"]


def test_turns_outside_the_ledger_have_no_annotations_and_no_children() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1], [2]))
    ledger.commit(make_draft(0, 2, [3], [4]))
    for turn in (2, -1):
        with pytest.raises(IndexError, match=rf"turn {turn}\b.* 2 turns"):
            ledger.annotate("reward", 1, turn=turn)
        with pytest.raises(IndexError, match=rf"turn {turn}\b.* 2 turns"):
            ledger.commit(make_draft(turn, 4, [1], [2]))
        with pytest.raises(IndexError):
            ledger.check(make_draft(turn, 4, [1], [2]))
        with pytest.raises(IndexError):
            ledger.path_length(turn)
    assert (len(ledger), ledger.annotations) == (2, ())
    ledger.annotate("reward", 1, turn=1)
    ledger.annotate("reward", 2, turn=0)
    assert (ledger.annotation("reward", turn=1), ledger.annotation("reward", turn=0)) == (1, 2)
    assert (ledger.annotation("reward"), ledger.annotation("reward", default=7)) == (None, 7)


def test_trajectories_are_a_list_that_may_be_called_and_travels_as_a_list() -> None:
    """`ledger.trajectories()` was a method; `model.trajectories` always was a list."""
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200, 201]))
    ledger.commit(replace(make_draft(0, 3, [100], [202]), constrained=True))
    for called in (ledger.trajectories, ledger.trajectories(), pickle.loads(pickle.dumps(ledger.trajectories))):
        assert [path.turns for path in called] == [(0, 1)]
        assert sum(called[0].loss_mask) == 2
    assert sum(ledger.trajectories(train_constrained=True)[0].loss_mask) == 3
    assert type(pickle.loads(pickle.dumps(ledger.trajectories))) is list


def test_a_call_id_is_given_again_only_while_no_later_one_is_in_use() -> None:
    ids = Ledger().call_ids
    failed: list[str] = []
    other: list[str] = []
    again: list[str] = []
    first, second, third = ids.next(failed), ids.next(failed), ids.next(other)
    ids.give_back(failed)  # `other` has a later one
    assert ids.next(again) not in (first, second, third)
    ids.give_back(again)
    ids.give_back(other)
    assert ids.next(again) == third
