"""Batches for any trainer, padded or packed, as numpy arrays or torch tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from strands_tito.export.sample import GroupBy, TrainingSample, group_fields, sampled_mask
from strands_tito.export.trainer import import_optional, refuse_images
from tito_core.ledger.errors import TITOError

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]


class TooLongError(TITOError, ValueError):
    """A sample is longer than a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Index-aligned columns of b samples, padded to length l. A mask value belongs to the token at its own index.

    The logits at index i - 1 score the token at index i: shift once, where the loss is computed.

    Attributes:
        input_ids: int64, shape (b, l), `pad_id` in the padding.
        attention_mask: int64, shape (b, l): 1 on tokens, 0 in the padding.
        position_ids: int64, shape (b, l): 0, 1, ... from a sample's first token; 0 in the padding.
        loss_mask: int64, shape (b, l): 1 on trained tokens.
        logprobs: float32, shape (b, l): the engine's logprob of every sampled token, 0.0 elsewhere, unchecked. The
            samples' `semantics` and `kept` say what they mean; `logprobs_for` checks them.
        prompt_lengths: int64, shape (b,).
        lengths: int64, shape (b,).
        credit: float32, shape (b, l): rewards of turns and tool calls; see `TrainingSample.credit`.
        rewards: float32, shape (b,), of the rollout, without `credit`; NaN if it has none.
        rollout_index: int64, shape (b,): number of the sample's rollout, from 0 in order of appearance. A rollout with
            several samples repeats its reward in each: count it once in a group's mean.
        group_index: int64, shape (b,): number of its group in the same way, -1 for a rollout without a group. See
            `group_by` of `padded`.
    """

    input_ids: Ints
    attention_mask: Ints
    position_ids: Ints
    loss_mask: Ints
    logprobs: npt.NDArray[np.float32]
    credit: npt.NDArray[np.float32]
    prompt_lengths: Ints
    lengths: Ints
    rewards: npt.NDArray[np.float32]
    rollout_index: Ints
    group_index: Ints

    def torch(self) -> dict[str, torch.Tensor]:
        """Return the columns as CPU tensors that share this batch's memory, by name."""
        torch = import_optional("torch", "torch")
        return {field.name: torch.from_numpy(getattr(self, field.name)) for field in fields(self)}


def padded(
    samples: Sequence[TrainingSample],
    *,
    pad_id: int,
    side: Literal["left", "right"] = "right",
    length: int | None = None,
    multiple_of: int = 1,
    group_by: GroupBy = "task",
) -> Batch:
    """Pad samples to one length.

    Args:
        samples: At least one sample.
        pad_id: The id of padding tokens; every mask is 0 on them.
        side: The side of the padding.
        length: Length of a row; that of the longest sample when None.
        multiple_of: Round the length up to a multiple of this.
        group_by: What `group_index` numbers; see `GroupBy`.

    Raises:
        ImagesNotSupportedError: A sample has images. Take them out first: `replace(sample, images=())`.
        TooLongError: A sample is longer than `length`. Samples are never truncated.
        ValueError: `samples` is empty, or `side`, `multiple_of` or `group_by` is out of range.
    """
    _expect_tokens(samples)
    if side not in ("left", "right") or multiple_of < 1:
        raise ValueError(f"side must be 'left' or 'right' and multiple_of at least 1, not {side!r} and {multiple_of}.")
    longest = max(len(sample) for sample in samples)
    if length is not None and longest > length:
        raise TooLongError(f"A sample has {longest} tokens and length={length}: raise length or drop the sample.")
    width = -(-(longest if length is None else length) // multiple_of) * multiple_of
    starts = [0 if side == "right" else width - len(sample) for sample in samples]
    placed = [Placed(row, at, at + len(one)) for row, (at, one) in enumerate(zip(starts, samples, strict=True))]
    columns = _columns(samples, placed, (len(samples), width), pad_id, group_by)
    return Batch(
        attention_mask=columns.pop("segment_ids"),
        prompt_lengths=np.array([sample.prompt_length for sample in samples], np.int64),
        lengths=np.array([len(sample) for sample in samples], np.int64),
        **columns,
    )


class Placed(NamedTuple):
    """The position of a sample: indices `start` to `stop` of a row."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Samples end to end in r rows of length l. A mask value belongs to the token at its own index; see `Batch`.

    For kernels that keep the samples of a row apart by `cu_seqlens` or segment ids.

    Attributes:
        input_ids: int64, shape (r, l), `pad_id` in the padding.
        position_ids: int64, shape (r, l): restarts at 0 with each sample; 0 in the padding.
        segment_ids: int64, shape (r, l): 1, 2, ... for the samples of a row; 0 in the padding.
        loss_mask: int64, shape (r, l): 1 on trained tokens. Never 1 on a sample's first token, because the token
            before it belongs to another sample.
        logprobs: float32, shape (r, l): the engine's logprob of every sampled token, 0.0 elsewhere.
        credit: float32, shape (r, l): rewards of turns and tool calls; see `TrainingSample.credit`.
        placed: The position of each sample, in the order of `samples`.
        rewards: float32, shape (b,), in the samples' order, of the rollout, without `credit`; NaN if it has none.
        rollout_index: int64, shape (b,), in the samples' order, and `group_index`: see `Batch`.
    """

    input_ids: Ints
    position_ids: Ints
    segment_ids: Ints
    loss_mask: Ints
    logprobs: npt.NDArray[np.float32]
    credit: npt.NDArray[np.float32]
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


def packed(samples: Sequence[TrainingSample], *, pad_id: int, length: int, group_by: GroupBy = "task") -> PackedBatch:
    """Pack samples into rows, the longest first, each into the first row that has room.

    Args:
        samples: At least one sample.
        pad_id: The id of padding tokens.
        length: Length of a row.
        group_by: See `padded`.

    Raises:
        ImagesNotSupportedError: A sample has images. Take them out first: `replace(sample, images=())`.
        TooLongError: A sample is longer than a row.
        ValueError: `samples` is empty.
    """
    _expect_tokens(samples)
    placed = _places([len(sample) for sample in samples], length)
    shape = (max(place.row for place in placed) + 1, length)
    return PackedBatch(placed=tuple(placed), **_columns(samples, placed, shape, pad_id, group_by))


def _expect_tokens(samples: Sequence[TrainingSample]) -> None:
    if not samples:
        raise ValueError("A batch needs at least one sample.")
    for sample in samples:
        refuse_images(sample.images, "a batch of tokens", sample.identity.rollout_id)


def _columns(
    samples: Sequence[TrainingSample], placed: Sequence[Placed], shape: tuple[int, int], pad_id: int, group_by: GroupBy
) -> dict[str, Any]:
    """Return the columns that both kinds of batches have, by name, with each sample in its place."""
    ids = np.full(shape, pad_id, np.int64)
    positions, segments, mask = (np.zeros(shape, np.int64) for _ in range(3))
    logprobs, credit = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    seen = [0] * shape[0]
    for place, sample in sorted(zip(placed, samples, strict=True), key=lambda pair: pair[0]):
        at = (place.row, slice(place.start, place.stop))
        seen[place.row] += 1
        ids[at] = sample.token_ids
        positions[at] = np.arange(len(sample))
        segments[at] = seen[place.row]
        mask[at] = sample.loss_mask
        logprobs[at] = known_logprobs(sample)
        credit[at] = 0 if sample.credit is None else sample.credit
    return {
        **{"input_ids": ids, "position_ids": positions, "segment_ids": segments, "loss_mask": mask},
        **{"logprobs": logprobs, "credit": credit, "rewards": rewards_of(samples)},
        "rollout_index": numbers_of(sample.identity.rollout_id for sample in samples),
        "group_index": groups_of(samples, group_by),
    }


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


def known_logprobs(sample: TrainingSample) -> npt.NDArray[np.float32]:
    """Return the engine's logprobs, shape (n,), with 0.0 instead of NaN on tokens that it did not sample."""
    return np.where(sampled_mask(sample), sample.logprobs, np.float32(0)).astype(np.float32)


def groups_of(samples: Iterable[TrainingSample], by: GroupBy) -> Ints:
    """Return the number of each sample's group, shape (b,); see `padded`."""
    names = ("group_id", *group_fields(by))
    keys = [{name: getattr(one.identity, name) for name in names} for one in samples]
    return numbers_of(None if None in (key["group_id"], key.get("turn", 0)) else tuple(key.values()) for key in keys)


def numbers_of(names: Iterable[Hashable | None]) -> Ints:
    """Return the number of each name, from 0 in order of appearance, shape (b,); -1 for None."""
    numbers: dict[Hashable, int] = {}
    return np.array([-1 if name is None else numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def rewards_of(samples: Sequence[TrainingSample]) -> npt.NDArray[np.float32]:
    """Return the rewards, shape (b,), NaN for a sample without one."""
    return np.array([np.nan if sample.reward is None else sample.reward for sample in samples], np.float32)
