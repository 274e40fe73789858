"""Examples: what a ledger commits, what it refuses, what stays unchanged, and values at the edge."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.drafts import make_draft
from support.picture_ledgers import two_images
from support.refusals import breaks_law
from tito_core.ledger import Column, LawViolationError, Ledger, Sampling, Semantics
from tito_core.ledger.columns import ROUNDING, SENTINEL_LOGPROB, check_logprobs
from tito_core.ledger.history import strict


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


# Semantics of logprobs, and what a path has.


@pytest.mark.parametrize(
    ("temperature", "adjusted", "comparable"),
    [(1.0, False, True), (1.0, True, False), (0.5, False, False), (0.5, True, False), (None, False, False)],
)
def test_scoring_compares_only_raw_logprobs_at_temperature_one(
    temperature: float | None, adjusted: bool, comparable: bool
) -> None:
    assert Semantics(None, temperature, adjusted, "test").comparable_with_scoring() is comparable


def test_a_path_has_the_media_and_images_of_its_turns() -> None:
    ledger = two_images()
    assert [[(span.offset, span.length) for span in ledger.media(index)] for index in (None, 0, 1)] == [
        [],
        [(1, 4)],
        [(1, 4), (9, 2)],
    ]
    (trajectory,) = ledger.iter_trajectories()
    assert [image.sha256 for image in trajectory.images] == [span.sha256 for span in ledger.media(1)]
    assert len({image.data for image in trajectory.images}) == 2


# Values at the edge of what is accepted, and just beyond it.


JUST_ROUNDING = np.float32(ROUNDING)
BEYOND = np.nextafter(JUST_ROUNDING, np.float32(1))


@given(length=st.integers(1, 40), data=st.data())
def test_one_negative_id_among_zeros_is_found_wherever_it_is(length: int, data: st.DataObject) -> None:
    split, at = data.draw(st.integers(0, length)), data.draw(st.integers(0, length - 1))
    ids = [0] * length
    ids[at] = data.draw(st.integers(-(2**31), -1))
    name, offset = ("delta", at) if at < split else ("output", at - split)
    with breaks_law(2, "turn 0", f"{name} id {ids[at]}", f"offset {offset}"):
        Ledger().commit(make_draft(None, 0, ids[:split], ids[split:]))


def test_a_logprob_may_exceed_0_by_float32_rounding_only() -> None:
    check_logprobs(np.array([-0.5, JUST_ROUNDING], np.float32))
    with breaks_law(4, "output offset 2"):
        check_logprobs(np.array([-1.0, JUST_ROUNDING, BEYOND], np.float32))


def refusal(logprobs: Any) -> LawViolationError | None:
    try:
        check_logprobs(logprobs)
    except LawViolationError as error:
        return error
    return None


@pytest.mark.parametrize("low", [0, 0xFFFF])
def test_every_leading_half_of_a_float32_is_accepted_or_refused(low: int) -> None:
    values = (np.arange(2**16, dtype=np.uint32) << 16 | low).astype(np.uint32).view(np.float32)
    sound = (values > SENTINEL_LOGPROB) & (values <= ROUNDING)
    check_logprobs(values[sound])
    for value in values[~sound]:  # `pytest.raises` for each would take seconds
        error = refusal(np.array([value], np.float32))
        assert error is not None
        assert (error.law, "output offset 0" in str(error)) == (4, True)


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans()))
def test_a_strict_number_equals_only_its_own_value_and_type(value: float) -> None:
    again = type(value)(str(value)) if not isinstance(value, bool) else value  # equal, but mostly another object
    assert strict(value) == value
    assert strict(value) == again
    assert strict(value) == strict(again)
    whole = [int(value)] if value == value // 1 else []
    for other in (*whole, float(value), bool(value)):
        same = type(other) is type(value) and other == value
        assert (strict(value) == other) is same
        assert (strict(value) == strict(other)) is same
