"""The kept set: the ids that top-k, top-p and min-p left to sample from, and how much probability they had.

A policy that is sampled under a truncation chooses each token with p(token) / p(kept set), not with p(token). The ratio
of a trainer is right only if it computes its logprobs over the same set (sampling replay), or nothing was truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tito_core.ledger.columns import TokenIds
from tito_core.ledger.trajectory import Trajectory
from tito_core.ledger.turn import Draft

Mass = npt.NDArray[np.float32]
EXACT = 1e-4
"""Bounds of a probability that differ by a smaller share are one number; a kept set with all but this is everything."""
_HARMLESS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "extra"}
)
_HARMLESS_EXTRA = frozenset({"stop_regex", "repetition_detection", "include_stop_str_in_output", "stream_interval"})
"""Sampling parameters, and fields in `extra`, that change no distribution, or are compared on their own."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept set of each of n tokens, ragged: that of token i is `ids[offsets[i]:offsets[i + 1]]`.

    Attributes:
        ids: int32, shape (m,), in the engine's order.
        offsets: int32, shape (n + 1,). A set is empty where none was recorded.
        mass: float32, shape (n, 2): a lower and an upper bound of the probability that the kept set has in the
            distribution that the recorded logprobs are of; 1, 1 where nothing was truncated, 0, 1 where it is unknown.
    """

    ids: TokenIds
    offsets: npt.NDArray[np.int32]
    mass: Mass

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Sizes of the sets, shape (n,)."""
        return np.diff(self.offsets)

    def part(self, start: int, stop: int) -> KeptSets:
        """Return the sets of tokens `start` to `stop`."""
        first, last = self.offsets[start], self.offsets[stop]
        return KeptSets(self.ids[first:last], self.offsets[start : stop + 1] - first, self.mass[start:stop])

    def padded(self, width: int | None = None) -> TokenIds:
        """Return the ids as rows, int32, shape (n, width); -1 pads at the end. `width` is at least the largest size."""
        counts = self.counts
        columns = np.arange(int(counts.max(initial=0)) if width is None else width)
        rows = np.full((len(counts), len(columns)), -1, np.int32)
        rows[columns < counts[:, None]] = self.ids
        return rows


def kept_logprobs(scores: Any, token_ids: Any, kept: KeptSets) -> Any:
    """Return the logprobs of tokens over their kept sets; over the whole vocabulary where a set is empty.

    A trainer that calls this with its own logits computes what the engine sampled from. Gradients pass through tensors.

    Args:
        scores: Logits divided by the temperature, or logprobs: a NumPy array or a torch tensor, shape (n, vocabulary).
            Row i scores token i: of a model's logits it is the one at index i - 1.
        token_ids: Ids of the tokens, shape (n,).
        kept: Their kept sets.

    Returns:
        Shape (n,), of the type of `scores`.

    Raises:
        ValueError: A token is not in its set, or the lengths differ.
    """
    ids, rows = np.asarray(token_ids, np.int64), kept.padded()
    if not len(scores) == len(ids) == len(rows):
        raise ValueError(
            f"{len(scores)} rows of scores, {len(ids)} tokens and {len(rows)} kept sets: give one for each."
        )
    has = kept.counts > 0
    if (outside := np.flatnonzero(has & ~(rows == ids[:, None]).any(axis=1))).size:
        raise ValueError(f"Token {ids[outside[0]]} at index {outside[0]} is not in its kept set of tokens.")
    total = _log_sum(scores) + 0.0  # a copy: torch needs the sum itself, unchanged, for its gradient
    if has.any():
        bias = np.where(rows[has] >= 0, 0.0, -np.inf)
        at = (np.flatnonzero(has)[:, None], np.maximum(rows[has], 0))
        total[has] = _log_sum(scores[at] + (scores.new_tensor(bias) if hasattr(scores, "new_tensor") else bias))
    return scores[np.arange(len(ids)), ids] - total


def _log_sum(scores: Any) -> Any:
    return scores.logsumexp(1) if hasattr(scores, "logsumexp") else np.logaddexp.reduce(scores, axis=1)


def is_truncated(sampling: Mapping[str, Any]) -> bool:
    """Return whether a turn's sampling parameters left tokens out. Greedy sampling does not count as a truncation."""
    cut = sampling.get("top_k", -1) > 0 or sampling.get("top_p", 1.0) < 1 or sampling.get("min_p", 0.0) > 0
    return bool(sampling.get("temperature", 1.0) > 0 and cut)


def has_sets(kept: KeptSets | None) -> bool:
    """Return whether any token has a recorded kept set."""
    return kept is not None and len(kept.ids) > 0


def kept_sets(turns: Sequence[tuple[Draft, int]], length: int) -> KeptSets | None:
    """Return the kept sets of `length` tokens.

    Args:
        turns: Turns, each with the index of its first output token, in order.
        length: Number of tokens, n.

    Returns:
        The sets. A turn whose recorded logprobs are those of the distribution that was sampled has none. None if all
        turns are like that.
    """
    counts, mass = np.zeros(length, np.int64), np.ones((length, 2), np.float32)
    found: list[npt.NDArray[Any]] = []
    is_whole = True
    for draft, start in turns:
        place = slice(start, start + draft.columns.output)
        if (bounds := mass_of(draft)) is None:  # a greedy answer's recorded set is the token alone
            continue
        is_whole, mass[place] = False, bounds
        if (mask := draft.extras.get("sampling_mask")) is not None:
            rows = mask.values.astype(np.int32)
            counts[place] = (rows >= 0).sum(axis=1)
            found.append(rows[rows >= 0])
    if is_whole:
        return None
    ids = np.concatenate(found) if found else np.zeros(0, np.int32)
    return KeptSets(ids, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), mass)


def kept_sets_of(trajectory: Trajectory) -> KeptSets | None:
    """Return the kept sets of a trajectory's tokens; see `kept_sets`."""
    turns = [(turn.draft, turn.path_length - turn.draft.columns.output) for turn in trajectory.path]
    return kept_sets(turns, len(trajectory))


def mass_of(draft: Draft) -> Mass | None:
    """Return bounds of the kept sets' probability, as far as the recorded top logprobs show it; see `KeptSets.mass`.

    Returns:
        float32, shape (n, 2), or None where the logprobs are those of the distribution that was sampled.
    """
    n, sampling, semantics = draft.columns.output, draft.sampling, draft.engine.semantics
    unknown, is_moved = np.tile(np.array([0, 1], np.float32), (n, 1)), _is_moved(draft)
    if not is_truncated(sampling):
        return unknown if is_moved or semantics.adjusted else None
    top, mask = draft.extras.get("top_logprobs"), draft.extras.get("sampling_mask")
    if is_moved or top is None or (semantics.adjusted and (mask is None or draft.constrained)):
        return unknown
    p = np.exp(np.nan_to_num(top.values.astype(np.float64), nan=-np.inf))
    if mask is None:
        bounds = _of_prefix(-np.sort(-p, axis=1), sampling)
    else:
        ids, kept = (column.values.astype(np.int64) for column in (draft.extras["top_ids"], mask))
        own = draft.output_ids[:, None]  # its logprob is known, also where it is not among the top ones
        known = (ids[:, :, None] == kept[:, None, :]).any(axis=2) & (ids >= 0) & (ids != own)
        low = (p * known).sum(axis=1) + np.exp(draft.logprobs.astype(np.float64))
        missing = (kept >= 0).sum(axis=1) - known.sum(axis=1) - 1
        least = np.where(p > 0, p, 1).min(axis=1, initial=1.0)
        bounds = np.stack([low, low + missing * least], axis=1)
    return np.clip(bounds, 0, 1).astype(np.float32)


def _is_moved(draft: Draft) -> bool:
    """Return whether something else than a truncation makes the sampled distribution another than the logprobs' own.

    That is another temperature, a penalty or a bias, before which vLLM takes its raw logprobs. All logprobs are those
    after a grammar.
    """
    sampling, temperature = draft.sampling, draft.sampling.get("temperature", 1.0)
    others = {name for name, value in sampling.items() if value} - _HARMLESS - {"repetition_penalty"}
    is_biased = bool(others or set(sampling.get("extra") or ()) - _HARMLESS_EXTRA)
    is_scaled = bool(temperature) and draft.engine.semantics.temperature != temperature
    return is_scaled or is_biased or sampling.get("repetition_penalty", 1.0) != 1.0


def _of_prefix(p: npt.NDArray[np.float64], sampling: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Return bounds for a kept set that is not recorded: it is some number of the likeliest tokens, ties aside.

    Engines apply top-p to the probabilities before top-k or after it; the bounds hold for both.

    Args:
        p: The largest probabilities, shape (n, k), in descending order.
        sampling: The turn's sampling parameters.
    """
    top_k, top_p, min_p = sampling.get("top_k", -1), sampling.get("top_p", 1.0), sampling.get("min_p", 0.0)
    total, last = np.cumsum(p, axis=1), p[:, -1]
    low, high = np.ones(len(p)), np.ones(len(p))
    if top_k > 0:
        low = total[:, min(top_k, p.shape[1]) - 1]
        high = np.minimum(low + max(top_k - p.shape[1], 0) * last, 1)
    if min_p > 0:
        least = min_p * p[:, 0]
        likely = (p * (p >= least[:, None])).sum(axis=1)
        low, high = np.minimum(low, likely), np.where(last < least, np.minimum(high, likely), high)
    if top_p < 1:
        alone = (top_k <= 0) & (min_p <= 0) & (total[:, -1] >= top_p - EXACT)
        # Rounding decides which tokens a sum that equals top_p has.
        low = np.where(alone, _reaching(total, top_p - EXACT), low * top_p)
        high = np.minimum(high, _reaching(total, top_p + EXACT))
    return np.stack([np.minimum(low, high), high], axis=1)


def _reaching(total: npt.NDArray[np.float64], least: float) -> npt.NDArray[np.float64]:
    """Return per row the first sum that is at least this, or 1."""
    reached = total >= least
    return np.where(reached.any(axis=1), total[np.arange(len(total)), reached.argmax(axis=1)], 1)
