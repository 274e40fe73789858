"""Rollouts as Tinker's `Datum`, by its own types, through what it sends."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given, settings

from strands_tito.export import LogprobMismatchError, samples_of
from strands_tito.export.tinker import datum_of
from support.rollout_forests import HOT, chain, rollouts
from tito_core.ledger import Ledger

seen = 0


def values(data: Any) -> list[Any]:
    return list(np.asarray(data.to_numpy()).tolist())


@settings(max_examples=60, deadline=None, database=None)
@given(rollouts())
def data_are_tinkers(ledger: Ledger) -> None:
    global seen
    total = 0
    for sample in samples_of(ledger):
        if len(sample) < 2:
            continue
        seen += 1
        datum = datum_of(sample, advantage=2.0, logprobs="as-recorded")
        assert isinstance(datum, tinker.Datum)
        ids = sample.token_ids.tolist()
        assert datum.model_input.to_ints() == ids[:-1]
        assert values(datum.loss_fn_inputs["target_tokens"]) == ids[1:]
        advantages = values(datum.loss_fn_inputs["advantages"])
        trained = np.zeros(len(ids) - 1) if sample.ended_outside else sample.loss_mask[1:]
        assert advantages == (2.0 * trained).tolist()
        each = np.arange(len(ids), dtype=np.float32)
        by_token = datum_of(sample, advantage=each, logprobs="as-recorded").loss_fn_inputs["advantages"]
        assert values(by_token) == (each[1:] * trained).tolist()
        given_back = values(datum.loss_fn_inputs["logprobs"])
        mask = sample.loss_mask[1:].astype(bool)
        assert [one for one, kept in zip(given_back, mask, strict=True) if kept] == sample.logprobs[1:][mask].tolist()
        assert len(given_back) == len(advantages) == len(ids) - 1
        total += int(np.count_nonzero(advantages))
    outside = samples_of(ledger)[0].ended_outside
    free = sum(len(turn.draft.output_ids) for turn in ledger if not turn.draft.constrained)
    assert total == (0 if outside else free)


def other_logprobs_are_refused() -> None:
    (sample,) = samples_of(chain((3, 2), semantics=HOT))
    with pytest.raises(LogprobMismatchError, match="Tinker compares"):
        datum_of(sample, advantage=1.0)
    assert "logprobs" not in datum_of(sample, advantage=1.0, logprobs="omit").loss_fn_inputs


if __name__ == "__main__":
    data_are_tinkers()
    other_logprobs_are_refused()
    print(f"tinker: ok, {version('tinker')}, {seen} samples")
