"""Make training batches from ledgers: padded columns and advantages; also from re-tokenized text, for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strands_tito import Ledger, Trajectory
from strands_tito.inspect.mismatch import mismatch_of

PARTS = ("by_turn", "by_position")


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence as index-aligned columns of shape (n,). `positions` count from the start of each segment."""

    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    turns: np.ndarray
    positions: np.ndarray


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


def rows_of(ledgers: Sequence[Ledger], teacher: Sequence[np.ndarray] | None = None) -> list[Row]:
    """Return one row for each trajectory, with the ids, loss mask and logprobs of the ledger.

    With a teacher's logprobs of each trajectory, a token's advantage is teacher - student: minus its share of the
    reverse KL, KL(student || teacher).
    """
    pairs = zip(ledgers, advantages(ledgers), strict=True)
    paths = [(trajectory, advantage) for ledger, advantage in pairs for trajectory in ledger.trajectories]
    rows = []
    for number, (trajectory, advantage) in enumerate(paths):
        ids, mask, logprobs = trajectory.token_ids, trajectory.loss_mask == 1, trajectory.logprobs
        each = np.full(len(ids), advantage) if teacher is None else teacher[number] - logprobs
        lengths = [segment.stop - segment.start for segment in trajectory.segments]
        turns = np.repeat([segment.turn for segment in trajectory.segments], lengths)
        rows.append(Row(ids, mask, logprobs, each, turns, np.concatenate([np.arange(length) for length in lengths])))
    return rows


def retokenized(ledgers: Sequence[Ledger], tokenizer: Any) -> list[Row]:
    """Return rows as text-based pipelines make them: answers decoded and encoded again, logprobs paired in order."""
    found = []
    for ledger in ledgers:
        for trajectory in ledger.trajectories:
            pieces = [_piece(trajectory, segment, tokenizer) for segment in trajectory.segments]
            ids, mask, logprobs = map(np.concatenate, zip(*pieces, strict=True))
            nothing = np.zeros(len(ids), int)
            found.append(Row(ids, mask, logprobs, nothing, nothing, nothing))
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


def trained(rows: Sequence[Row], column: str) -> np.ndarray:
    """Return a column's values of the trained tokens, in the learner's order."""
    return np.concatenate([getattr(row, column)[row.mask] for row in rows])


def reverse_kl(rows: Sequence[Row]) -> float:
    """Return KL(student || teacher) in nats a token, estimated by the mean of student - teacher over sampled tokens."""
    return -float(trained(rows, "advantages").mean())


def mismatch(rows: Sequence[Row], scores: Path, shown: Sequence[str] = PARTS) -> dict[str, Any]:
    """Return the figures of `mismatch_of` for the learner's logprobs in a file: of all tokens, and of the shown parts.

    Each of a part is a list, in the order of the fields of `Mismatch`.
    """
    turns, positions = trained(rows, "turns"), trained(rows, "positions")
    found = mismatch_of(trained(rows, "logprobs"), np.load(scores), turns=turns, positions=positions)
    parts = {name: {str(key): list(astuple(value)) for key, value in getattr(found, name).items()} for name in shown}
    return {**(asdict(found.whole) if found.whole else {}), **parts}


def write(rows: Sequence[Row], path: Path) -> str:
    """Write the rows, right-padded, as `learner.load` reads them."""
    width = max(len(row.ids) for row in rows)
    shape = (len(rows), width)
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    logprobs, advantages = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        tokens[number, : len(row.ids)] = row.ids
        mask[number, : len(row.ids)] = row.mask
        logprobs[number, : len(row.ids)] = np.where(row.mask, row.logprobs, 0)
        advantages[number, : len(row.ids)] = np.where(row.mask, row.advantages, 0)
    np.savez(path, tokens=tokens, mask=mask, logprobs=logprobs, advantages=advantages)
    return str(path)
