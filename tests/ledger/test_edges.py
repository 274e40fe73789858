"""Edges, each told apart from the value beside it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.drafts import make_draft
from tito_core.ledger import Header, LawViolationError, Ledger, Sampling, Semantics
from tito_core.ledger.invariants import ROUNDING, SENTINEL_LOGPROB, check_logprobs
from tito_core.ledger.json_equality import strict
from tito_core.ledger.turn import Server

JUST_ROUNDING = np.float32(ROUNDING)
BEYOND = np.nextafter(JUST_ROUNDING, np.float32(1))


@given(length=st.integers(1, 40), data=st.data())
def test_one_negative_id_among_zeros_is_found_wherever_it_is(length: int, data: st.DataObject) -> None:
    split, at = data.draw(st.integers(0, length)), data.draw(st.integers(0, length - 1))
    ids = [0] * length
    ids[at] = data.draw(st.integers(-(2**31), -1))
    name, offset = ("delta", at) if at < split else ("output", at - split)
    with pytest.raises(LawViolationError, match=f"turn 0: {name} id {ids[at]} at offset {offset} is negative"):
        Ledger().commit(make_draft(None, 0, ids[:split], ids[split:]))


def test_a_logprob_may_exceed_0_by_rounding_and_by_no_more() -> None:
    check_logprobs(np.array([-0.5, JUST_ROUNDING], np.float32))
    with pytest.raises(LawViolationError, match="at output offset 2 is"):
        check_logprobs(np.array([-1.0, JUST_ROUNDING, BEYOND], np.float32))


def test_which_float32_are_log_probabilities_is_told_of_each_leading_half() -> None:
    halves = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0, 1, 0xFFFF):
        values = (halves | low).astype(np.uint32).view(np.float32)
        for value in values:
            alone = np.array([value], np.float32)
            if SENTINEL_LOGPROB < value <= ROUNDING:
                check_logprobs(alone)
                continue
            with pytest.raises(LawViolationError, match="at output offset 0 is no log-probability"):
                check_logprobs(alone)


@given(sound=st.lists(st.floats(-9998, 0, width=32)), wrong=st.integers(0, 2**32 - 1), data=st.data())
def test_one_number_that_is_no_log_probability_is_found_wherever_it_is(
    sound: list[float], wrong: int, data: st.DataObject
) -> None:
    check_logprobs(np.array(sound, np.float32))
    at = data.draw(st.integers(0, len(sound)))
    odd = np.array([wrong], np.uint32).view(np.float32)
    values = np.concatenate([np.array(sound[:at], np.float32), odd, np.array(sound[at:], np.float32)])
    if SENTINEL_LOGPROB < odd[0] <= ROUNDING:
        check_logprobs(values)
        return
    with pytest.raises(LawViolationError, match=f"at output offset {at} is no log-probability"):
        check_logprobs(values)


def test_constrained_tokens_are_trained_only_on_demand_however_paths_are_asked_for() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1], [2, 3], constrained=True))
    assert [path.loss_mask.tolist() for path in ledger.iter_trajectories()] == [[0, 0, 0]]
    assert [path.loss_mask.tolist() for path in ledger.iter_trajectories(train_constrained=True)] == [[0, 1, 1]]


def test_a_ledger_keeps_the_certificate_that_it_is_given() -> None:
    certificate = {"template": "a" * 64, "candidate": "suffix"}
    assert Ledger(certificate=certificate).header.certificate == certificate
    assert Ledger().header.certificate is None


def test_nothing_is_no_uuid() -> None:
    with pytest.raises(ValueError, match="'' is not a canonical UUID"):
        Header("")


def test_values_that_nobody_committed_are_those_of_the_first_turn() -> None:
    assert Sampling({}).first == 0
    assert Server("vllm", "m", Semantics(None, None, False, "test")).first == 0


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans()))
def test_a_strict_number_equals_its_own_value_and_kind_alone(value: float) -> None:
    again = type(value)(str(value)) if not isinstance(value, bool) else value  # equal, and mostly another object
    assert strict(value) == value
    assert strict(value) == again
    assert strict(value) == strict(again)
    whole = [int(value)] if value == value // 1 else []
    for other in (*whole, float(value), bool(value)):
        same = type(other) is type(value) and other == value
        assert (strict(value) == other) is same
        assert (strict(value) == strict(other)) is same
