"""Values at the edge of what is accepted, and just beyond it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.drafts import make_draft
from support.refusals import breaks_law
from tito_core.ledger import LawViolationError, Ledger
from tito_core.ledger.columns import ROUNDING, SENTINEL_LOGPROB, check_logprobs
from tito_core.ledger.history import strict

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
