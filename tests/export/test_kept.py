"""Kept sets: what a trainer computes over them is what was sampled, and what cannot be replayed is refused."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.export import LogprobMismatchError, logprobs_for, samples_of
from strands_tito.export.kept import KeptSets, is_truncated, kept_logprobs, mass_of
from strands_tito.export.parquet import read_parquet, write_parquet
from strands_tito.export.slime import fields_of
from strands_tito.export.trainer import sampled_logprobs
from support.drafts import make_draft
from support.kept_sets import VOCABULARY, sampled, truncated
from tito_core.ledger import Column, Sampling

LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, VOCABULARY),
        "top_p": st.sampled_from([0.3, 0.7, 0.9, 0.99]),
        "min_p": st.sampled_from([0.05, 0.3, 0.9]),
    },
).filter(bool)
TRAINER: dict[str, Any] = {"temperature": 1.0, "trainer": "X"}


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.lists(st.sets(st.integers(0, 9)), max_size=6), st.data())
def test_logprobs_over_kept_sets_are_those_of_the_slow_sum(
    seed: int, sets: list[set[int]], data: st.DataObject
) -> None:
    tokens = [data.draw(st.sampled_from(sorted(each or range(10)))) for each in sets]
    scores = np.random.default_rng(seed).normal(size=(len(sets), 10))
    offsets = np.cumsum([0, *map(len, sets)]).astype(np.int32)
    kept = KeptSets(np.array([token for row in sets for token in row], np.int32), offsets, np.ones((len(sets), 2)))
    expected = [
        math.log(math.exp(row[token]) / sum(math.exp(row[each]) for each in each_set or range(10)))
        for row, token, each_set in zip(scores.tolist(), tokens, sets, strict=True)
    ]
    np.testing.assert_allclose(kept_logprobs(scores, tokens, kept), expected, atol=1e-9)
    assert [row[row >= 0].tolist() for row in kept.padded(10)] == [list(row) for row in sets]


def test_a_token_outside_its_kept_set_is_refused() -> None:
    kept = KeptSets(np.array([1, 2], np.int32), np.array([0, 2], np.int32), np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match="Token 3 at index 0 is not in its kept set"):
        kept_logprobs(np.zeros((1, 5)), [3], kept)
    with pytest.raises(ValueError, match="2 rows of scores, 1 tokens and 1 kept sets"):
        kept_logprobs(np.zeros((2, 5)), [1], kept)


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 3), LIMITS, st.booleans())
def test_a_trainer_that_replays_gets_the_sets_and_the_logprobs_that_were_sampled(
    seed: int, turns: int, limits: dict[str, Any], over: bool
) -> None:
    truth = sampled(seed, turns, top=VOCABULARY, mask=True, over=over, **limits)
    (sample,) = samples_of(truth.ledger)
    assert sample.kept is not None
    trained = sample.loss_mask.astype(bool)
    values = logprobs_for(sample, **TRAINER, replays=True)
    assert values is not None
    np.testing.assert_allclose(values[trained], truth.over_kept, atol=2e-4)
    rows = sample.kept.padded()
    assert [row[row >= 0].tolist() for row in rows[trained]] == truth.kept
    assert (rows[~trained] == -1).all()
    fields = fields_of(sample, decode=str, temperature=1.0, top_p_replay=True)
    ids, offsets = fields["rollout_top_p_token_ids"], fields["rollout_top_p_token_offsets"]
    assert len(offsets) == fields["response_length"] + 1
    spans = [ids[start:stop].tolist() for start, stop in pairwise(offsets)]
    assert [span for span, mask in zip(spans, fields["loss_mask"], strict=True) if mask] == truth.kept
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(Path(folder) / "one.parquet", [sample])
        (again,) = read_parquet(Path(folder) / "one.parquet")
    assert again.kept is not None
    for name in KeptSets.__slots__:
        np.testing.assert_array_equal(getattr(again.kept, name), getattr(sample.kept, name), strict=True)


@settings(max_examples=120)
@given(st.integers(0, 2**32), LIMITS, st.integers(1, VOCABULARY), st.booleans())
def test_the_recorded_top_logprobs_bound_the_probability_of_the_kept_set(
    seed: int, limits: dict[str, Any], top: int, mask: bool
) -> None:
    truth = sampled(seed, 2, top=top, mask=mask, **limits)
    (sample,) = samples_of(truth.ledger)
    assert sample.kept is not None
    mass = np.exp(np.array(truth.whole) - np.array(truth.over_kept))
    low, high = sample.kept.mass[sample.loss_mask.astype(bool)].T
    assert (low <= mass + 1e-5).all()
    assert (mass <= high + 1e-5).all()
    if mask and top == VOCABULARY:
        np.testing.assert_allclose(low, high, atol=1e-5)


@pytest.mark.parametrize("replays", [False, True])
def test_a_truncation_without_kept_sets_is_refused_and_the_error_says_by_how_much(replays: bool) -> None:
    truth = sampled(7, 3, top=VOCABULARY, mask=False, top_p=0.7)
    (sample,) = samples_of(truth.ledger)
    with pytest.raises(LogprobMismatchError, match=r"Law 11.*top_p.*logprobs='as-recorded'") as caught:
        logprobs_for(sample, **TRAINER, replays=replays)
    found = re.search(r"off by (\S+) to (\S+) nats", str(caught.value))
    assert found is not None
    off = float(np.mean(np.array(truth.over_kept) - np.array(truth.whole)))
    assert float(found[1]) - 0.01 <= off <= float(found[2]) + 0.01
    for policy in ("as-recorded", "omit"):
        logprobs_for(sample, **TRAINER, replays=replays, policy=policy)
    (blind,) = samples_of(truncated(7, 3, top=0, mask=False, top_p=0.7))
    with pytest.raises(LogprobMismatchError, match=rf"For {blind.loss_mask.sum()} of them it is unknown"):
        logprobs_for(blind, **TRAINER, replays=replays)


def test_a_trainer_without_a_place_for_kept_sets_is_refused_although_they_are_recorded() -> None:
    (sample,) = samples_of(truncated(7, 3, top=VOCABULARY, mask=True, top_k=3))
    with pytest.raises(LogprobMismatchError, match="X has no place for kept sets"):
        logprobs_for(sample, **TRAINER)
    with pytest.raises(LogprobMismatchError, match="slime has no place for kept sets, or does not replay them"):
        fields_of(sample, decode=str, temperature=1.0)


def test_neutral_and_greedy_sampling_are_no_truncation() -> None:
    for sampling in ({}, {"temperature": 0.0, "top_k": 3}):
        (sample,) = samples_of(truncated(1, 2, top=0, mask=bool(sampling), **sampling))
        assert sample.kept is None, "a trainer computes over the whole vocabulary, whose logprobs these are"
        assert logprobs_for(sample, **TRAINER, replays=True) is not None
    assert not is_truncated(Sampling({"temperature": 0.0, "top_k": 1}))


MOVED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.1},
    {"min_new_tokens": 3},
    {"extra": {"logit_bias": {"5": -100}}},
    {"extra": {"a field of some engine": 1}},
]


@pytest.mark.parametrize("moved", MOVED, ids=str)
@pytest.mark.parametrize("limits", [{}, {"top_k": 3}])
def test_raw_logprobs_of_a_turn_that_was_sampled_from_another_distribution_are_refused(
    moved: dict[str, Any], limits: dict[str, Any]
) -> None:
    """vLLM's raw logprobs are taken before all of these, so that nothing in their semantics shows it."""
    (sample,) = samples_of(truncated(7, 2, top=VOCABULARY, mask=bool(limits), **limits, **moved))
    with pytest.raises(LogprobMismatchError, match=r"after a penalty.*it is unknown by how much"):
        logprobs_for(sample, **TRAINER, replays=True)
    (same,) = samples_of(truncated(7, 2, top=0, mask=False, extra={"stop_regex": "x"}, stop=["x"]))
    assert logprobs_for(same, **TRAINER) is not None


def test_a_sum_that_equals_top_p_may_be_the_whole_set() -> None:
    """float32 says 0.4999998: with the next token the set seemed to be everything."""
    top = np.log(np.array([[0.5, 0.25, 0.25]], np.float32)) - np.float32(1e-7)
    draft = replace(
        make_draft(None, 0, [1], [0], logprobs=top[0, :1]),
        sampling=Sampling({"temperature": 1.0, "top_p": 0.5}),
        extras={"top_ids": Column.of(1, np.arange(3)[None]), "top_logprobs": Column.of(1, top)},
    )
    np.testing.assert_allclose(mass_of(draft), [[0.5, 0.75]], atol=1e-6)


def test_bounds_of_a_small_probability_are_apart_by_their_share() -> None:
    """Of two tokens in 20,000 equal ones, the other one's logprob was not among those that are recorded."""
    ids, offsets = np.array([5, 7], np.int32), np.array([0, 2], np.int32)
    own, trained = np.log(np.full(1, 1 / 20_000, np.float32)), np.ones(1, np.bool_)
    arguments: Any = {"trainer": "X", "rollout": "r", "replays": True}
    wide, exact = (KeptSets(ids, offsets, np.array([[5e-5, most]], np.float32)) for most in (1e-4, 5e-5))
    with pytest.raises(LogprobMismatchError, match=r"off by 9\.21 to 9\.9 nats"):
        sampled_logprobs(own, wide, trained, **arguments)
    assert sampled_logprobs(own, exact, trained, **arguments) == pytest.approx(0, abs=1e-6)
