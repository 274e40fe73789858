"""Padded and packed batches: every token of every sample is at its index, and everything else is masked."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.export import MissingPackageError, TrainingSample, samples_of
from strands_tito.export.batch import TooLongError, packed, padded
from strands_tito.export.sample import sampled_mask
from support.rollout_forests import chain, rollouts
from tito_core.ledger import Ledger

PAD = 7
few = settings(max_examples=25)
sets = st.lists(rollouts(most_turns=4), min_size=1, max_size=3)


def all_of(ledgers: list[Ledger]) -> list[TrainingSample]:
    return [sample for ledger in ledgers for sample in samples_of(ledger)]


@few
@given(sets, st.sampled_from(["left", "right"]), st.integers(0, 3), st.sampled_from([1, 8]))
def test_a_padded_row_is_its_sample_and_padding(ledgers: list[Ledger], side: str, more: int, multiple: int) -> None:
    samples = all_of(ledgers)
    width = max(len(sample) for sample in samples) + more
    batch = padded(samples, pad_id=PAD, side=side, length=width, multiple_of=multiple)  # type: ignore[arg-type]
    assert batch.input_ids.shape == (len(samples), -(-width // multiple) * multiple)
    for row, sample in enumerate(samples):
        size, total = len(sample), batch.input_ids.shape[1]
        place = slice(0, size) if side == "right" else slice(total - size, total)
        rest = np.ones(total, np.bool_)
        rest[place] = False
        assert batch.input_ids[row, place].tolist() == sample.token_ids.tolist()
        assert batch.attention_mask[row, place].all()
        assert batch.position_ids[row, place].tolist() == list(range(size))
        assert batch.loss_mask[row, place].tolist() == sample.loss_mask.tolist()
        known = sampled_mask(sample)
        assert (batch.logprobs[row, place][known] == sample.logprobs[known]).all()
        assert not batch.logprobs[row, place][~known].any()
        assert (batch.input_ids[row, rest] == PAD).all()
        for column in (batch.attention_mask, batch.position_ids, batch.loss_mask, batch.logprobs):
            assert not column[row, rest].any()
        assert (batch.lengths[row], batch.prompt_lengths[row]) == (size, sample.prompt_length)
        reward = batch.rewards[row]
        assert np.isnan(reward) if sample.reward is None else reward == np.float32(sample.reward)


@few
@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(1, 3)), min_size=1, max_size=4))
def test_a_batch_numbers_rollouts_and_groups(rollouts: list[tuple[str | None, int]]) -> None:
    """So that a group's mean counts each rollout once, however many samples it has."""
    samples, expected = [], []
    for number, (group, paths) in enumerate(rollouts):
        ledger = Ledger(group_id=group)
        for draft in (turn.draft for _ in range(paths) for turn in chain((2, 2))):
            ledger.commit(draft)
        samples += samples_of(ledger)
        groups = list(dict.fromkeys(name for name, _ in rollouts if name is not None))
        expected += [(number, -1 if group is None else groups.index(group))] * paths
    for batch in (padded(samples, pad_id=PAD), packed(samples, pad_id=PAD, length=8)):
        assert (batch.rollout_index.dtype, batch.group_index.dtype) == (np.int64, np.int64)
        assert list(zip(batch.rollout_index.tolist(), batch.group_index.tolist(), strict=True)) == expected


@few
@given(sets, st.integers(0, 40))
def test_a_packed_batch_holds_every_sample_once(ledgers: list[Ledger], more: int) -> None:
    samples = all_of(ledgers)
    length = max(len(sample) for sample in samples) + more
    batch = packed(samples, pad_id=PAD, length=length)
    taken = np.zeros(batch.input_ids.shape, np.int64)
    for sample, place in zip(samples, batch.placed, strict=True):
        at = (place.row, slice(place.start, place.stop))
        taken[at] += 1
        assert batch.input_ids[at].tolist() == sample.token_ids.tolist()
        assert batch.position_ids[at].tolist() == list(range(len(sample)))
        assert batch.loss_mask[at].tolist() == sample.loss_mask.tolist()
        assert batch.logprobs[at][sampled_mask(sample)].tolist() == sample.logprobs[sampled_mask(sample)].tolist()
        assert len(set(batch.segment_ids[at].tolist())) == 1
    assert taken.max() == 1
    empty = taken == 0
    assert (batch.input_ids[empty] == PAD).all()
    for column in (batch.position_ids, batch.segment_ids, batch.loss_mask, batch.logprobs):
        assert not column[empty].any()
    for row in range(len(batch.input_ids)):
        mine = [place for place in batch.placed if place.row == row]
        assert sorted(set(batch.segment_ids[row]) - {0}) == list(range(1, len(mine) + 1))
        bounds = batch.cu_seqlens(row)
        assert bounds.dtype == np.int32
        assert bounds[0] == 0
        assert bounds[-1] == length
        assert set(bounds.tolist()) == {0, length} | {place.start for place in mine} | {place.stop for place in mine}
    first = {place.row: place for place in reversed(batch.placed)}
    assert set(first) == set(range(len(batch.input_ids)))


def test_packing_fills_rows() -> None:
    samples = [samples_of(chain((2, size - 2)))[0] for size in (6, 4, 10, 5, 5)]
    batch = packed(samples, pad_id=PAD, length=10)
    assert batch.input_ids.shape == (3, 10)
    assert [place.row for place in batch.placed] == [1, 1, 0, 2, 2]
    assert not (batch.segment_ids == 0).any()
    assert batch.cu_seqlens(1).tolist() == [0, 6, 10]


def test_what_does_not_fit_is_refused_not_cut() -> None:
    samples = samples_of(chain((2, 6)))
    for make in (padded, packed):
        with pytest.raises(TooLongError, match="8 tokens and length=7: raise length"):
            make(samples, pad_id=PAD, length=7)
        with pytest.raises(ValueError, match="at least one sample"):
            make([], pad_id=PAD, length=7)
    with pytest.raises(ValueError, match="not 'up' and 1"):
        padded(samples, pad_id=PAD, side="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not 'left' and 0"):
        padded(samples, pad_id=PAD, side="left", multiple_of=0)


@pytest.mark.parametrize("make", [padded, packed])
def test_torch_is_asked_for_by_its_extra(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    batch = make(samples_of(chain((2, 6))), pad_id=PAD, length=9)
    with pytest.raises(MissingPackageError, match=r"'\.\[torch\]'"):
        batch.torch()
