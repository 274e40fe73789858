"""Packed batches: several samples a row, for kernels that keep them apart by `cu_seqlens` or segment ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from strands_tito.export.batch import Ints, TooLongError, known_logprobs, numbers_of, rewards_of
from strands_tito.export.images import refuse_images
from strands_tito.export.optional_dependency import import_optional
from strands_tito.export.sample import TrainingSample

if TYPE_CHECKING:
    import torch


class Placed(NamedTuple):
    """The position of a sample: indices `start` to `stop` of a row."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Samples end to end in r rows of length l. A mask value belongs to the token at its own index; see `Batch`.

    Attributes:
        input_ids: int64, shape (r, l), `pad_id` in the padding.
        position_ids: int64, shape (r, l): restarts at 0 with each sample; 0 in the padding.
        segment_ids: int64, shape (r, l): 1, 2, ... for the samples of a row; 0 in the padding.
        loss_mask: int64, shape (r, l): 1 on trained tokens. Never 1 on a sample's first token, because the token
            before it belongs to another sample.
        logprobs: float32, shape (r, l): the engine's logprob of every sampled token, 0.0 elsewhere.
        placed: The position of each sample, in the order of `samples`.
        rewards: float32, shape (b,), in the samples' order, NaN if a rollout has no reward.
        rollout_index: int64, shape (b,), in the samples' order, and `group_index`: see `Batch`.
    """

    input_ids: Ints
    position_ids: Ints
    segment_ids: Ints
    loss_mask: Ints
    logprobs: npt.NDArray[np.float32]
    placed: tuple[Placed, ...]
    rewards: npt.NDArray[np.float32]
    rollout_index: Ints
    group_index: Ints

    def cu_seqlens(self, row: int) -> npt.NDArray[np.int32]:
        """Return the boundaries of a row's samples as FlashAttention takes them; padding counts as one more sample.

        Returns:
            int32, shape (samples of the row + 1,), one longer if the row has padding.
        """
        stops = sorted(place.stop for place in self.placed if place.row == row)
        width = self.input_ids.shape[1]
        return np.array([0, *stops, *([width] if stops[-1] < width else [])], np.int32)

    def torch(self) -> dict[str, torch.Tensor]:
        """Return the columns, without `placed`, as CPU tensors that share this batch's memory, by name."""
        torch = import_optional("torch", "torch")
        named = [field.name for field in fields(self) if field.name != "placed"]
        return {name: torch.from_numpy(getattr(self, name)) for name in named}


def packed(samples: Sequence[TrainingSample], *, pad_id: int, length: int) -> PackedBatch:
    """Pack samples into rows, the longest first, each into the first row that has room.

    Args:
        samples: At least one sample.
        pad_id: The id of padding tokens.
        length: Length of a row.

    Raises:
        ImagesNotSupportedError: A sample has images. Take them out first: `replace(sample, images=())`.
        TooLongError: A sample is longer than a row.
        ValueError: `samples` is empty.
    """
    if not samples:
        raise ValueError("A batch needs at least one sample.")
    for sample in samples:
        refuse_images(sample.images, "a batch of tokens", sample.identity.rollout_id)
    placed = _places([len(sample) for sample in samples], length)
    shape = (max(place.row for place in placed) + 1, length)
    ids = np.full(shape, pad_id, np.int64)
    positions, segments, mask = (np.zeros(shape, np.int64) for _ in range(3))
    logprobs = np.zeros(shape, np.float32)
    seen = [0] * shape[0]
    for place, sample in sorted(zip(placed, samples, strict=True), key=lambda pair: pair[0]):
        at = (place.row, slice(place.start, place.stop))
        seen[place.row] += 1
        ids[at] = sample.token_ids
        positions[at] = np.arange(len(sample))
        segments[at] = seen[place.row]
        mask[at] = sample.loss_mask
        logprobs[at] = known_logprobs(sample)
    rollouts = numbers_of(sample.identity.rollout_id for sample in samples)
    groups = numbers_of(sample.identity.group_id for sample in samples)
    rewards = rewards_of(samples)
    return PackedBatch(ids, positions, segments, mask, logprobs, tuple(placed), rewards, rollouts, groups)


def _places(lengths: Sequence[int], length: int) -> list[Placed]:
    used: list[int] = []
    places: dict[int, Placed] = {}
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        size = lengths[number]
        if size > length:
            raise TooLongError(f"A sample has {size} tokens and length={length}: raise length or drop the sample.")
        row = next((row for row, taken in enumerate(used) if taken + size <= length), len(used))
        if row == len(used):
            used.append(0)
        places[number] = Placed(row, used[row], used[row] + size)
        used[row] += size
    return [places[number] for number in range(len(lengths))]
