"""Rollouts as verifiers' traces through prime-rl's own `trace_to_samples`: each sampled token is trained once."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from hypothesis import given, settings
from prime_rl.orchestrator.trajectories import trace_to_samples

from strands_tito.export import samples_of
from strands_tito.export.verifiers import trace_of
from support.picture_ledgers import PAD, Patches, two_images
from support.rollout_forests import rollouts
from tito_core.ledger import Ledger

seen = 0


@settings(max_examples=80, deadline=None, database=None)
@given(rollouts())
def samples_are_trained_as_sampled(ledger: Ledger) -> None:
    global seen
    options: dict[str, Any] = {"temperature": 1.0, "decode": lambda ids: " ".join(map(str, ids))}
    weights = {"advantages": [turn.index + 1 for turn in ledger], "loss_weights": {"rl": [0.5] * len(ledger)}}
    trace = trace_of(ledger, **options, logprobs="as-recorded", **weights)
    found, ours = trace_to_samples(trace), samples_of(ledger)
    assert sum(sum(sample.mask) for sample in found) == sum(int(sample.loss_mask.sum()) for sample in ours)
    for sample in found:
        seen += 1
        trained = np.array(sample.mask, bool)
        logprobs = np.array(sample.logprobs, np.float32)
        same = [each for each in ours if each.token_ids.tolist() == sample.token_ids]
        assert any(np.array_equal(logprobs[trained], each.logprobs[trained]) for each in same)
        assert sample.advantages is not None
        assert sample.rl_weights is not None
        assert {sample.rl_weights[at] for at in np.flatnonzero(trained)} == {0.5}
        assert all(sample.advantages[at] >= 1 for at in np.flatnonzero(trained))


def every_placeholder_has_its_feature() -> None:
    """In prime-rl's own sample, which its trainer packs."""
    ledger = two_images()
    options: dict[str, Any] = {"temperature": 1.0, "decode": str, "logprobs": "as-recorded"}
    (sample,) = trace_to_samples(trace_of(ledger, processor=Patches(), **options), mm_token_type_ids_mapping={PAD: 1})
    assert sample.mm_token_type_ids == [int(token == PAD) for token in sample.token_ids]
    assert sample.mm_kwargs is not None
    grid = sample.mm_kwargs["image_grid_thw"]
    rows = np.frombuffer(grid.data, grid.dtype).reshape(grid.shape)
    assert rows.tolist() == [[1, 2, 8], [1, 2, 4]]
    assert sample.mm_kwargs["pixel_values"].shape == [24, 3]
    assert sum(sample.mm_token_type_ids) == int(rows.prod(axis=1).sum()) // 4


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    samples_are_trained_as_sampled()
    every_placeholder_has_its_feature()
    print(f"prime-rl: ok, {seen} samples")
