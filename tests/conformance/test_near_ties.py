"""Two greedy answers of one server must be equal up to a near-tie, whose width depends on the tolerance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tito_conformance.checks import BrokenLawError, Tally
from tito_conformance.fixed import NEAR_TIE_NATS, _compare


def answer(*tokens: tuple[int, float]) -> Any:
    ids, logprobs = zip(*tokens, strict=True)
    return SimpleNamespace(output_ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32))


def compare(one: Any, other: Any, tolerance: float) -> Tally:
    tally = Tally()
    connected: Any = SimpleNamespace(tolerance_nats=tolerance)
    _compare(connected, tally, "alone", one, other, "Count.")
    return tally


@pytest.mark.parametrize(
    ("apart", "tolerance", "holds"),
    [
        (0.015, 0.001, True),
        (0.06, 0.001, False),  # in float32
        (0.06, 0.25, True),  # in bfloat16
        (0.49, 0.25, True),
        (0.51, 0.25, False),
    ],
)
def test_tokens_may_differ_only_at_a_near_tie(apart: float, tolerance: float, holds: bool) -> None:
    one, other = answer((5, -0.5), (7, -1.0), (8, -1.0)), answer((5, -0.5), (9, -1.0 - apart), (1, -3.0), (2, -4.0))
    if holds:
        assert compare(one, other, tolerance).notes
    else:
        with pytest.raises(BrokenLawError, match="token 1 is 7, then 9"):
            compare(one, other, tolerance)


@pytest.mark.parametrize("tolerance", [0.001, 0.25])
def test_equal_tokens_have_equal_logprobs_and_equal_lengths(tolerance: float) -> None:
    near = max(NEAR_TIE_NATS, 2 * tolerance)
    one = answer((5, -0.5), (7, -1.0))
    assert compare(one, answer((5, -0.5), (7, -1.0 - 0.9 * near)), tolerance).passed["alone"] == 2
    with pytest.raises(BrokenLawError, match=f"{1.1 * near:.3g} nats apart"):
        compare(one, answer((5, -0.5), (7, -1.0 - 1.1 * near)), tolerance)
    with pytest.raises(BrokenLawError, match="2 and 1 tokens"):
        compare(one, answer((5, -0.5)), tolerance)
