"""Examples: what a ledger takes, what it refuses, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.drafts import make_draft
from support.forests import digest_of
from tito_core.ledger import (
    Branch,
    CallRecord,
    Column,
    Columns,
    LawViolationError,
    Ledger,
    Reason,
    Sampling,
    check_ledger,
)
from tito_core.store import SchemaError, from_record, to_record


def test_a_draft_copies_its_arrays_and_nobody_can_write_to_them() -> None:
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


def test_turns_without_sampling_parameters_share_them_too() -> None:
    ledger = Ledger()
    for parent, length in ((None, 0), (0, 2)):
        ledger.commit(make_draft(parent, length, [100], [200], sampling=Sampling({})))
    assert ledger[1].draft.sampling is ledger[0].draft.sampling


def test_constrained_tokens_are_trained_only_when_asked_for() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200, 201], constrained=True))
    assert ledger.trajectories()[0].loss_mask.sum() == 0
    assert ledger.trajectories(train_constrained=True)[0].loss_mask.tolist() == [0, 1, 1]
    assert np.isfinite(ledger.trajectories()[0].logprobs[1:]).all()


def test_segments_say_which_tokens_belong_to_which_turn() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100, 101], [200]))
    ledger.commit(make_draft(0, 3, [102], [201, 202]))
    runs = [(s.turn, s.start, s.stop, s.is_output) for s in ledger.trajectories()[0].segments]
    assert runs == [(0, 0, 2, False), (0, 2, 3, True), (1, 3, 4, False), (1, 4, 6, True)]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ((np.array([2**31]), [0], [1], [-1.0]), "delta ids hold 2147483648 to 2147483648"),
        (([1], [0], np.array([2**64 - 1], np.uint64), [-1.0]), "output ids hold 18446744073709551615"),
        (([1], [0], [2**70], [-1.0]), "output ids must be whole numbers, not object"),
        (([1.0], [0], [1], [-1.0]), "delta ids must be whole numbers, not float64"),
        (([True], [0], [1], [-1.0]), "delta ids must be whole numbers, not bool"),
        (([[1]], [0], [1], [-1.0]), r"delta ids must have shape \(n,\), not \(1, 1\)"),
        (([1], [256], [1], [-1.0]), "provenance hold 256 to 256"),
        (([1], [0], [1], [-1]), "logprobs must be floats"),
        (([1], [0], [1], [None]), "logprobs must be floats"),
        (([1], [0], [1], ["-1.0"]), "logprobs must be floats"),
    ],
)
def test_what_does_not_fit_a_column_is_refused(columns: tuple[Any, Any, Any, Any], words: str) -> None:
    with pytest.raises(LawViolationError, match=words):
        Columns.pack(*columns)


def test_a_logprob_beyond_float32_is_no_log_probability() -> None:
    with pytest.raises(LawViolationError, match="logprob -inf at output offset 0"):
        Ledger().commit(make_draft(None, 0, [100], [200], logprobs=np.array([-1e300])))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([2**31], "holds 2147483648 to 2147483648, more than int32 takes"),
        ([-(2**31) - 1], "more than int32 takes"),
        ([1e300], "beyond float32"),
        (["a"], "numbers row by row"),
        (3, "numbers row by row"),
        ([1j], "numbers row by row"),
    ],
)
def test_what_no_optional_column_holds_is_refused(values: Any, words: str) -> None:
    with pytest.raises(LawViolationError, match=words):
        Column.of(0, values)


def test_an_optional_column_keeps_infinity_nan_and_rows_that_lie_apart_in_memory() -> None:
    assert Column.of(0, [-np.inf, np.nan]).values.tolist()[0] == -np.inf
    slanted = np.arange(6).reshape(2, 3).T[::-1]
    assert Column.of(0, slanted).values.tolist() == slanted.tolist()
    assert Column.of(0, [True, False]).values.tolist() == [1, 0]


def test_a_column_without_rows_does_not_spoil_those_of_other_turns() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [], extras={"top_ids": Column.of(1, [])}))
    ledger.commit(make_draft(0, 1, [101], [200], extras={"top_ids": Column.of(2, [[200, 300]])}))
    assert ledger.trajectories()[0].column("top_ids", -1 + 1).tolist() == [[0, 0], [0, 0], [200, 300]]


@pytest.mark.parametrize("fill", [0.5, float("nan"), -1, 256])
def test_a_fill_that_a_column_does_not_hold_is_refused(fill: float) -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], extras={"routed_experts": Column.of(1, [[3]])}))
    with pytest.raises(LawViolationError, match="does not fit"):
        ledger.trajectories()[0].column("routed_experts", fill)


def test_a_branch_is_checked_before_the_turn_is_taken() -> None:
    ledger = Ledger()
    with pytest.raises(LawViolationError, match="it is the first root, and yet a branch"):
        ledger.commit(make_draft(None, 0, [100], [200], branch=Branch(Reason.EDIT)))
    ledger.commit(make_draft(None, 0, [100], [200]))
    with pytest.raises(LawViolationError, match="left turn 1, which is not before it"):
        ledger.commit(make_draft(None, 0, [100], [200], branch=Branch(Reason.EDIT, 1)))
    assert len(ledger) == 1
    check_ledger(ledger)


def test_a_call_named_over_two_lines_is_drawn_on_one() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], calls=(CallRecord("look\nturn 9", "malformed", 0, 1),)))
    ledger = from_record(to_record(ledger))
    assert r"calls 'look\nturn 9' (malformed)" in ledger.tree().splitlines()[1]


QUESTION, ANSWER = {"role": "user", "content": [{"text": "1+1?"}]}, {"role": "assistant", "content": [{"text": "2"}]}


def test_an_equal_answer_after_loading_does_not_hide_the_loaded_turns() -> None:
    """Of eight agents that said the same, the one that goes on must find its own turn, not the latest one's."""
    history = [{"system": None}, QUESTION]
    fingerprint = digest_of([*history, ANSWER])
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], fingerprint=fingerprint), ledger.match(history), ANSWER)
    ledger = from_record(to_record(ledger))
    ledger.commit(make_draft(None, 0, [100], [200], fingerprint=fingerprint), ledger.match(history), ANSWER)
    assert sorted(ledger.match([*history, ANSWER, QUESTION]).node.turns) == [0, 1]


def test_histories_that_differ_only_in_a_numbers_kind_stay_apart_when_they_are_prepared_at_once() -> None:
    ledger = Ledger()
    histories = [[{"system": None}, {"role": "user", "n": number}] for number in (1, 1.0, True)]
    matches = [ledger.match(history) for history in histories]
    for history, match in zip(histories, matches, strict=True):
        fingerprint = digest_of([*history, ANSWER])
        ledger.commit(make_draft(None, 0, [100], [200], fingerprint=fingerprint), match, ANSWER)
    found = [ledger.match([*history, ANSWER]).node.turns for history in histories]
    assert found == [[0], [1], [2]]


def test_a_turn_prepared_before_the_messages_were_let_go_of_is_found_by_its_digest() -> None:
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
def test_a_record_whose_parts_do_not_fit_together_is_refused(change: dict[str, Any]) -> None:
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
def test_a_record_that_loads_but_breaks_a_law_is_named(change: dict[str, Any], law: int) -> None:
    ledger = from_record(_record(**change))
    with pytest.raises(LawViolationError) as caught:
        check_ledger(ledger)
    assert caught.value.law == law


def test_an_annotation_about_a_turn_that_is_not_there_is_named() -> None:
    record = _record()
    record["annotations"] = [{"name": "reward", "value": 1, "turn": 2}]
    with pytest.raises(LawViolationError, match="annotation 'reward' is about turn 2; there are 2"):
        check_ledger(from_record(record))


@pytest.mark.parametrize("part", ["header", "turns", "annotations"])
def test_a_record_without_a_part_is_refused(part: str) -> None:
    record = _record()
    del record[part]
    with pytest.raises(SchemaError, match="cannot be read" if part == "header" else f"no list of {part}"):
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
def test_what_is_wrong_is_refused_whatever_was_checked_before(wrong: str, checked_before: bool) -> None:
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
    with pytest.raises(LawViolationError, match="the engine reported a prompt of 9 tokens"):
        ledger.commit(replace(draft, prompt_length=9))
    assert ledger.commit(draft).index == 0


def test_a_draft_that_follows_nothing_of_the_ledger_cannot_be_checked() -> None:
    with pytest.raises(IndexError):
        Ledger().check(make_draft(0, 3, [1], [2]))
