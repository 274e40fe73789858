"""Make training batches from ledgers: padded columns and advantages; also from re-tokenized text, for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strands_tito import Ledger, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence: `ids`, `mask` and `logprobs`, index-aligned, shape (n,), and the advantage of its rollout."""

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantage: float


def advantages(ledgers: Sequence[Ledger]) -> list[float]:
    """Return each rollout's reward normalised within its group; 0 if all rewards of a group are equal."""
    groups: defaultdict[str | None, list[float]] = defaultdict(list)
    for ledger in ledgers:
        groups[ledger.header.group_id].append(ledger.annotation("reward"))
    return [
        (ledger.annotation("reward") - np.mean(group)) / (np.std(group) + 1e-4)
        for ledger in ledgers
        for group in [groups[ledger.header.group_id]]
    ]


def rows_of(ledgers: Sequence[Ledger]) -> list[Row]:
    """Return one row for each trajectory, with the ids, loss mask and logprobs of the ledger."""
    return [
        Row(trajectory.token_ids, trajectory.loss_mask == 1, trajectory.logprobs, advantage)
        for ledger, advantage in zip(ledgers, advantages(ledgers), strict=True)
        for trajectory in ledger.trajectories
    ]


def retokenized(ledgers: Sequence[Ledger], tokenizer: Any) -> list[Row]:
    """Return rows as text-based pipelines make them: answers decoded and encoded again, logprobs paired in order."""
    found = []
    for ledger in ledgers:
        for trajectory in ledger.trajectories:
            pieces = [_piece(trajectory, segment, tokenizer) for segment in trajectory.segments]
            ids, mask, logprobs = map(np.concatenate, zip(*pieces, strict=True))
            found.append(Row(ids, mask, logprobs, 0.0))
    return found


def _piece(trajectory: Trajectory, segment: Any, tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = trajectory.token_ids[segment.start : segment.stop]
    logprobs = trajectory.logprobs[segment.start : segment.stop]
    if not segment.is_output:
        return ids, np.zeros(len(ids), bool), logprobs
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    again = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    paired = min(len(ids), len(again))
    mask, padded = np.arange(len(again)) < paired, np.full(len(again), np.nan, np.float32)
    padded[:paired] = logprobs[:paired]
    return again, mask, padded


def changed(ours: Sequence[Row], theirs: Sequence[Row]) -> int:
    """Return the number of samples whose ids change when their text is tokenized again."""
    return sum(not np.array_equal(one.ids, other.ids) for one, other in zip(ours, theirs, strict=True))


def recorded(rows: Sequence[Row]) -> np.ndarray:
    """Return the recorded logprobs of the trained tokens, in the learner's order."""
    return np.concatenate([row.logprobs[row.mask] for row in rows])


def write(rows: Sequence[Row], path: Path) -> str:
    """Write the rows, right-padded, as `learner.load` reads them."""
    width = max(len(row.ids) for row in rows)
    shape = (len(rows), width)
    tokens, mask, logprobs = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        tokens[number, : len(row.ids)] = row.ids
        mask[number, : len(row.ids)] = row.mask
        logprobs[number, : len(row.ids)] = np.where(row.mask, row.logprobs, 0)
    advantage = np.array([row.advantage for row in rows], np.float32)
    np.savez(path, tokens=tokens, mask=mask, logprobs=logprobs, advantages=advantage)
    return str(path)
