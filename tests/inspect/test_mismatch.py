"""Mismatch of trainer and sampler: against the slow sums, and against the true divergence of known policies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_tito.inspect.mismatch import Mismatch, batch_mismatch, mismatch_of

TOKENS = st.lists(
    st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=30
)


def slow(pairs: list[tuple[float, float]]) -> Mismatch:
    ratios = [math.exp(trainer - recorded) for recorded, trainer in pairs]
    n = len(ratios)
    kl = sum(r - 1 - math.log(r) for r in ratios) / n
    reverse = sum(r * math.log(r) - (r - 1) for r in ratios) / n
    size = sum(ratios) ** 2 / sum(r * r for r in ratios)
    return Mismatch(n, kl, reverse, size / n, sum(not 0.5 <= r <= 2 for r in ratios) / n)


def same(one: Mismatch, other: Mismatch) -> bool:
    values = [(getattr(one, name), getattr(other, name)) for name in Mismatch.__slots__]
    return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in values)


@given(TOKENS)
def test_figures_are_those_of_the_slow_sums_in_whole_by_turn_and_by_position(
    tokens: list[tuple[float, float, int, int]],
) -> None:
    recorded, trainer, turns, positions = zip(*tokens, strict=True)
    found = mismatch_of(recorded, trainer, turns=turns, positions=positions)
    assert found.whole is not None
    assert same(found.whole, slow([(a, b) for a, b, _, _ in tokens]))
    assert list(found.by_turn) == sorted(set(turns))
    for turn, each in found.by_turn.items():
        assert same(each, slow([(a, b) for a, b, number, _ in tokens if number == turn]))
    for first, each in found.by_position.items():
        last = max(2 * first - 1, 0)
        assert same(each, slow([(a, b) for a, b, _, place in tokens if first <= place <= last]))
    assert sum(each.tokens for each in found.by_position.values()) == len(tokens)


def test_the_estimates_are_the_divergences_of_known_policies() -> None:
    """Every token once, weighted by how often the sampler draws it: the estimators are then exact."""
    sampler, trainer = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    drawn = np.array([0, 0, 1, 2])
    given = {"turns": np.zeros(4, int), "positions": np.arange(4)}
    whole = mismatch_of(np.log(sampler[drawn]), np.log(trainer[drawn]), **given).whole
    assert whole is not None
    assert whole.kl == pytest.approx(float((sampler * np.log(sampler / trainer)).sum()))
    assert whole.reverse_kl == pytest.approx(float((trainer * np.log(trainer / sampler)).sum()))
    close = mismatch_of([-1e-8, 0.0], [0.0, 0.0], turns=[0, 1], positions=[0, 0]).by_turn[0]
    assert min(close.kl, close.reverse_kl) >= 0
    equal = mismatch_of(np.log(sampler[drawn]), np.log(sampler[drawn]), **given).whole
    assert equal == Mismatch(4, 0.0, 0.0, 1.0, 0.0)


def test_what_cannot_be_compared_is_refused_and_nothing_is_nothing() -> None:
    with pytest.raises(ValueError, match="1 of 2 tokens have no finite ratio"):
        mismatch_of([-1, -1], [-1, -np.inf], turns=[0, 0], positions=[0, 1])
    for trainer, turns in (([-1, -1], [0]), ([-1], [0, 0]), (-1, [0, 0])):
        with pytest.raises(ValueError, match="one value for each token"):
            mismatch_of([-1, -1], trainer, turns=turns, positions=[0, 1])
    with pytest.raises(ValueError, match="1 of 1 tokens have no finite ratio"):
        mismatch_of([-np.inf], [-np.inf], turns=[0], positions=[0])
    nothing = mismatch_of([], [], turns=[], positions=[])
    assert (nothing.whole, dict(nothing.by_turn), dict(nothing.by_position)) == (None, {}, {})


@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.floats(-9, 0), st.floats(-9, 0)), max_size=12), max_size=4))
def test_a_batchs_runs_of_trained_tokens_are_its_turns(rows: list[list[tuple[int, float, float]]]) -> None:
    width = max(map(len, rows), default=0)
    whole = np.array([[*row, *[(0, math.nan, 3.0)] * (width - len(row))] for row in rows]).reshape(len(rows), width, 3)
    tokens: list[tuple[float, float, int, int]] = []
    for row in rows:
        turn, position = -1, -1
        for number, (trained, recorded, trainer) in enumerate(row):
            begins = trained and not (number and row[number - 1][0])
            turn, position = turn + begins, 0 if begins else position + 1
            tokens += [(recorded, trainer, turn, position)] * trained
    recorded, trainer, turns, positions = zip(*tokens, strict=True) if tokens else ((), (), (), ())
    found = batch_mismatch(whole[..., 1], whole[..., 2], whole[..., 0])
    assert found == mismatch_of(recorded, trainer, turns=turns, positions=positions)


def test_a_batch_of_unequal_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 1\), \(2, 3\)"):
        batch_mismatch(np.zeros((2, 3)), np.zeros((2, 1)), np.ones((2, 3)))
