"""Generic exports through their first readers: `datasets`, torch, and a loss that a model computes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import torch
from hypothesis import given, settings

from strands_tito.export import TrainingSample, samples_of
from strands_tito.export.batch import packed, padded
from strands_tito.export.hf import dataset_of, samples_of_dataset
from strands_tito.export.parquet import write_parquet
from support.rollout_forests import rollouts
from tito_core.ledger import Ledger

seen = 0


def same(one: TrainingSample, other: TrainingSample) -> bool:
    for name in TrainingSample.__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right, name
    return True


@settings(max_examples=20, deadline=None, database=None)
@given(rollouts())
def datasets_keep_them(ledger: Ledger) -> None:
    global seen
    samples = samples_of(ledger)
    seen += len(samples)
    dataset = dataset_of(samples)
    assert len(dataset) == len(samples)
    assert all(same(a, b) for a, b in zip(samples, samples_of_dataset(dataset), strict=True))
    assert [row["token_ids"] for row in dataset] == [sample.token_ids.tolist() for sample in samples]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "rollouts.parquet")
        write_parquet(path, samples)
        loaded = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=folder)
        assert all(same(a, b) for a, b in zip(samples, samples_of_dataset(loaded), strict=True))


class Bigrams(torch.nn.Module):
    """A policy whose logits depend on the token before, so that a wrong neighbour shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.randn(1300, 1300)

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Return log p of each token given those before it, in the shape of `ids`; 0 for the first."""
        logits = self.table[ids[:, :-1]].log_softmax(-1)
        scores = logits.gather(-1, ids[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(scores, (1, 0))


@settings(max_examples=30, deadline=None, database=None)
@given(rollouts())
def a_loss_is_the_same_alone_padded_and_packed(ledger: Ledger) -> None:
    model, samples = Bigrams(), samples_of(ledger)
    alone = 0.0
    for sample in samples:
        scores = model.score(torch.from_numpy(sample.token_ids.astype(np.int64))[None])[0]
        alone += float(scores[torch.from_numpy(sample.loss_mask.astype(bool))].sum())
    for side in ("left", "right"):
        batch = padded(samples, pad_id=0, side=side, multiple_of=8).torch()
        total = float((model.score(batch["input_ids"]) * batch["loss_mask"]).sum())
        assert abs(total - alone) < 1e-3
        assert batch["logprobs"].dtype == torch.float32
    both = packed(samples, pad_id=0, length=80).torch()
    assert abs(float((model.score(both["input_ids"]) * both["loss_mask"]).sum()) - alone) < 1e-3


if __name__ == "__main__":
    datasets_keep_them()
    a_loss_is_the_same_alone_padded_and_packed()
    print(
        f"generic: ok, {seen} samples, datasets {datasets.__version__}, pyarrow {pyarrow.__version__}, torch "
        f"{torch.__version__}"
    )
