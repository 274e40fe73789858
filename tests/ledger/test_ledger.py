"""Examples: what a ledger commits, what it refuses, and what stays unchanged."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.drafts import make_draft
from support.forests import digest_of
from support.refusals import breaks_law
from tito_core.ledger import (
    Branch,
    CallRecord,
    Column,
    LawViolationError,
    Ledger,
    Reason,
    Sampling,
    check_ledger,
)
from tito_core.store import SchemaError, from_record, to_record


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
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], sampling=Sampling(parameters)))
    parameters["temperature"] = 2.0
    parameters["stop"].append("b")
    assert dict(ledger[0].draft.sampling) == {"temperature": 1.0, "stop": ["a"]}


def test_turns_without_sampling_parameters_share_one_object() -> None:
    ledger = Ledger()
    for parent, length in ((None, 0), (0, 2)):
        ledger.commit(make_draft(parent, length, [100], [200], sampling=Sampling({})))
    assert ledger[1].draft.sampling is ledger[0].draft.sampling


def test_segments_tile_a_trajectory() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100, 101], [200]))
    ledger.commit(make_draft(0, 3, [102], [201, 202]))
    runs = [(s.turn, s.start, s.stop, s.is_output) for s in ledger.trajectories()[0].segments]
    assert runs == [(0, 0, 2, False), (0, 2, 3, True), (1, 3, 4, False), (1, 4, 6, True)]


def test_a_branch_is_checked_before_the_commit() -> None:
    ledger = Ledger()
    with breaks_law(8, "turn 0"):
        ledger.commit(make_draft(None, 0, [100], [200], branch=Branch(Reason.EDIT)))
    ledger.commit(make_draft(None, 0, [100], [200]))
    with breaks_law(8, "turn 1"):
        ledger.commit(make_draft(None, 0, [100], [200], branch=Branch(Reason.EDIT, 1)))
    assert len(ledger) == 1
    check_ledger(ledger)


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


def test_a_call_name_with_a_line_break_is_drawn_on_one_line() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], calls=(CallRecord("look\nturn 9", "malformed", 0, 1),)))
    ledger = from_record(to_record(ledger))
    assert r"calls 'look\nturn 9' (malformed)" in ledger.tree().splitlines()[1]


QUESTION, ANSWER = {"role": "user", "content": [{"text": "1+1?"}]}, {"role": "assistant", "content": [{"text": "2"}]}


def test_an_equal_answer_after_loading_does_not_hide_the_loaded_turns() -> None:
    """When agents have equal histories, each must find its own turn."""
    history = [{"system": None}, QUESTION]
    fingerprint = digest_of([*history, ANSWER])
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], fingerprint=fingerprint), ledger.match(history), ANSWER)
    ledger = from_record(to_record(ledger))
    ledger.commit(make_draft(None, 0, [100], [200], fingerprint=fingerprint), ledger.match(history), ANSWER)
    assert sorted(ledger.match([*history, ANSWER, QUESTION]).node.turns) == [0, 1]


def test_histories_that_differ_only_in_a_numbers_type_stay_apart() -> None:
    ledger = Ledger()
    histories = [[{"system": None}, {"role": "user", "n": number}] for number in (1, 1.0, True)]
    matches = [ledger.match(history) for history in histories]
    for history, match in zip(histories, matches, strict=True):
        fingerprint = digest_of([*history, ANSWER])
        ledger.commit(make_draft(None, 0, [100], [200], fingerprint=fingerprint), match, ANSWER)
    found = [ledger.match([*history, ANSWER]).node.turns for history in histories]
    assert found == [[0], [1], [2]]


def test_a_turn_matched_before_seal_is_found_by_its_digest() -> None:
    history = [{"system": None}, QUESTION]
    ledger = Ledger()
    match = ledger.match(history)
    ledger.seal()
    ledger.commit(make_draft(None, 0, [100], [200], fingerprint=digest_of([*history, ANSWER])), match, ANSWER)
    assert ledger.match([*history, ANSWER]).node.turns == [0]


def _record(**turn: object) -> dict[str, Any]:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], extras={"routed_experts": Column.of(0, [[1]])}))
    ledger.commit(make_draft(0, 2, [101], [201]))
    record = to_record(ledger)
    record["turns"][1] |= turn
    return record


@pytest.mark.parametrize(
    "change",
    [
        {"parent": 1},
        {"parent": -1},
        {"parent": "0"},
        {"sampling": 1},
        {"sampling": -1},
        {"sampling": None},
        {"engine": {"server": 1}},
        {"engine": {**_record()["turns"][1]["engine"], "server": -1}},
        {"columns": {"prompt": 1, "output": 1, "buffer": b""}},
        {"columns": {"prompt": -1, "output": 2, "buffer": bytes(11)}},
        {"extras": {"x": {"start": 0, "dtype": "|S1", "shape": [1], "buffer": b"a"}}},
        {"extras": {"x": {"start": 0, "dtype": "|O", "shape": [1], "buffer": bytes(8)}}},
        {"extras": {"x": {"start": 0, "dtype": "|u1", "shape": [], "buffer": b"a"}}},
        {"extras": {"x": {"start": 0, "dtype": "|u1", "shape": [-1], "buffer": b"a"}}},
        {"finish": "done"},
        {"branch": {"reason": "mood"}},
        {"calls": [["look"]]},
        {"media": [[0, 1]]},
    ],
    ids=str,
)
def test_a_record_with_contradictory_parts_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="cannot be read"):
        from_record(_record(**change))


@pytest.mark.parametrize(
    ("change", "law"),
    [
        ({"branch": {"reason": "edit", "turn": -1}}, 8),
        ({"branch": {"reason": "edit", "turn": 1}}, 8),
        ({"prompt_length": -1}, 4),
        ({"extras": {"x": {"start": -1, "dtype": "|u1", "shape": [1], "buffer": b"a"}}}, 2),
        ({"media": [[-1, 1, bytes(32)]]}, 2),
    ],
)
def test_a_record_that_loads_but_breaks_a_law_is_refused_by_the_check(change: dict[str, Any], law: int) -> None:
    ledger = from_record(_record(**change))
    with breaks_law(law, "turn 1"):
        check_ledger(ledger)


@pytest.mark.parametrize("part", ["header", "turns", "annotations"])
def test_a_record_without_a_part_is_refused(part: str) -> None:
    record = _record()
    del record[part]
    with pytest.raises(SchemaError, match=part):
        from_record(record)


WRONG: dict[str, dict[str, Any]] = {
    "an id": {"output_ids": np.array([7, -7], np.int32)},
    "a provenance": {"prompt_provenance": np.array([3], np.uint8)},
    "a logprob": {"logprobs": np.array([-1, 0.5], np.float32)},
    "the prompt's length": {"prompt_length": 99},
    "a call": {"calls": (CallRecord("look", "ok", 0, 9),)},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("checked_before", [False, True])
def test_a_wrong_draft_is_refused_after_another_was_checked(wrong: str, checked_before: bool) -> None:
    ledger = Ledger()
    if checked_before:
        ledger.check(make_draft(None, 0, [1], [2, 3]))
    draft = make_draft(None, 0, [1], [2, 3], **WRONG[wrong])
    for refuse in (ledger.check, ledger.commit, ledger.commit):
        with pytest.raises(LawViolationError):
            refuse(draft)
    assert len(ledger) == 0


def test_a_draft_that_was_changed_after_its_check_is_refused() -> None:
    ledger = Ledger()
    draft = make_draft(None, 0, [1], [2, 3])
    ledger.check(draft)
    with breaks_law(4, "9 tokens"):
        ledger.commit(replace(draft, prompt_length=9))
    assert ledger.commit(draft).index == 0


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


def test_a_loss_mask_adds_up() -> None:
    """In a narrow dtype the sum of more than 255 trained tokens overflows."""
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200] * 593))
    assert sum(ledger.trajectories[0].loss_mask) == 593
