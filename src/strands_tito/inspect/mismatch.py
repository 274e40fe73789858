"""How far a trainer's policy is from the one that sampled: KL divergences, effective sample size, ratios far from 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FAR_RATIOS = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What sampled tokens say about a trainer and a sampler, with r = p_trainer(token) / p_sampler(token).

    Both KL estimators are unbiased for tokens of the sampler, and no token's term is negative.

    Attributes:
        tokens: Number of tokens, n.
        kl: KL(sampler || trainer), in nats a token: the mean of r - 1 - log r ("k3").
        reverse_kl: KL(trainer || sampler), in nats a token: the mean of r log r - (r - 1).
        effective: Effective sample size as a share of n: (sum of r)² / (n * sum of r²), between 1 / n and 1.
        far: Share of tokens whose r is below 0.5 or above 2.
    """

    tokens: int
    kl: float
    reverse_kl: float
    effective: float
    far: float


@dataclass(frozen=True, slots=True)
class Mismatches:
    """The mismatch of all tokens, by turn, and by position in the answer.

    Attributes:
        whole: Of all tokens; None if there are none.
        by_turn: By the numbers that were given as turns.
        by_position: By the first position of its range: 0, 1, 2 to 3, 4 to 7, and so on.
    """

    whole: Mismatch | None
    by_turn: Mapping[int, Mismatch]
    by_position: Mapping[int, Mismatch]


def mismatch_of(
    recorded: npt.ArrayLike, trainer: npt.ArrayLike, *, turns: npt.ArrayLike, positions: npt.ArrayLike
) -> Mismatches:
    """Compare recorded logprobs with a trainer's, which must have the same semantics (law 11).

    Args:
        recorded: The sampler's logprobs of the trained tokens of a batch, shape (n,).
        trainer: The trainer's logprobs of these tokens, before its update, shape (n,).
        turns: The number of each token's turn, shape (n,).
        positions: Each token's position in its answer, from 0, shape (n,).

    Raises:
        ValueError: The shapes differ, or a logprob is not finite.
    """
    sampler, other = np.asarray(recorded, np.float64), np.asarray(trainer, np.float64)
    turn, position = np.asarray(turns, np.int64), np.asarray(positions, np.int64)
    shapes = [each.shape for each in (sampler, other, turn, position)]
    if sampler.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(f"Shapes {', '.join(map(str, shapes))}: give one value for each token.")
    with np.errstate(invalid="ignore", over="ignore"):  # refused below
        log_ratio = other - sampler
    if wrong := int(np.count_nonzero(~np.isfinite(log_ratio))):
        raise ValueError(f"{wrong} of {len(log_ratio)} tokens have no finite ratio: leave out tokens without logprobs.")
    first = np.where(position > 0, 1 << np.frexp(np.maximum(position, 1))[1].astype(np.int64) - 1, 0)
    whole = _mismatch(log_ratio) if len(log_ratio) else None
    parts = [{int(n): _mismatch(log_ratio[key == n]) for n in np.unique(key)} for key in (turn, first)]
    return Mismatches(whole, *parts)


def batch_mismatch(recorded: npt.ArrayLike, trainer: npt.ArrayLike, loss_mask: npt.ArrayLike) -> Mismatches:
    """Compare a batch's logprobs with a trainer's, as `mismatch_of`. A row's runs of trained tokens are its turns.

    Args:
        recorded: The sampler's logprobs, shape (b, t), as `Batch.logprobs` of `padded`.
        trainer: The trainer's, before its update, in the same places, shape (b, t).
        loss_mask: 1 on trained tokens; values elsewhere are ignored. Shape (b, t).

    Raises:
        ValueError: The shapes differ, or a trained token's logprob is not finite.
    """
    sampler, other, mask = np.asarray(recorded), np.asarray(trainer), np.asarray(loss_mask) == 1
    if mask.ndim != 2 or not sampler.shape == other.shape == mask.shape:
        raise ValueError(f"Shapes {sampler.shape}, {other.shape}, {mask.shape}: give three arrays of one shape (b, t).")
    starts = np.diff(mask, axis=1, prepend=False) & mask
    places = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    turns = np.cumsum(starts, axis=1) - 1
    return mismatch_of(sampler[mask], other[mask], turns=turns[mask], positions=positions[mask])


def _mismatch(log_ratio: npt.NDArray[np.float64]) -> Mismatch:
    weights = np.exp(log_ratio - log_ratio.max())  # a common factor does not change the effective size
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio)
        terms = ratio - 1 - log_ratio, ratio * (log_ratio - 1) + 1
    kl, reverse = (np.maximum(each, 0) for each in terms)  # rounding makes some of equal policies negative
    far = (ratio < FAR_RATIOS[0]) | (ratio > FAR_RATIOS[1])
    n = len(log_ratio)
    effective = float(weights.sum() ** 2 / (n * (weights**2).sum()))
    return Mismatch(n, float(kl.mean()), float(reverse.mean()), effective, float(far.mean()))
