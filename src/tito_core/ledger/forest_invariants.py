"""The laws that a whole ledger must keep, as functions: those of each turn, and how its turns and paths fit together.

Tests, the conformance suite and `tito verify` call `check_ledger`. Each function raises `LawViolationError` with one
sentence that names the law, turn, offset, expected and found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.invariants import (
    ROUNDING,
    SENTINEL_LOGPROB,
    check_branch,
    check_facts,
    check_prefix,
    check_values,
)
from tito_core.ledger.provenance import is_output
from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import Turn

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger

PIECE = 16
"""Turns of a path whose columns are put together and checked at once."""


def check_ledger(ledger: Ledger) -> None:
    """Check every law that a ledger alone can answer (1 to 4 and 8 to 10)."""
    turns = list(ledger)
    extended: set[int | None] = set()
    for turn in turns:
        check_prefix(ledger, turn)
        check_facts(turn.draft, path_length=turn.path_length - turn.own_length, turn=turn.index)
        check_branch(turn, first=turn.parent not in extended)
        extended.add(turn.parent)
    trained: Counter[int] = Counter()
    for path, context in _tails(ledger):
        for start in range(0, len(path), PIECE):  # columns of a whole path would be new pages, which cost more
            piece = assemble(path[start : start + PIECE], context=context, train_constrained=False)
            if not _is_sound(piece):  # all its turns at once; one by one only to name what is wrong
                for turn in piece.path:
                    check_values(turn.draft, turn=turn.index)
                check_alignment(piece)
            count_trained(piece, trained)
    check_trained_once(turns, trained)
    for note in ledger.annotations:
        if note.turn is not None and not 0 <= note.turn < len(turns):
            raise LawViolationError(8, f"annotation {note.name!r} is about turn {note.turn}; there are {len(turns)}.")


def _tails(ledger: Ledger) -> Iterator[tuple[list[Turn], set[int]]]:
    """Yield what each path adds to the earlier ones, after its last shared turns, and the indices of shared turns.

    A whole path for every leaf would cost the square of the turns where many leaves share a long trunk (law 12).
    """
    seen: set[int] = set()
    for leaf in ledger.leaves():
        tail: list[Turn] = []
        index: int | None = leaf
        shared = 0
        while index is not None and shared < PIECE:
            shared += index in seen
            tail.append(ledger[index])
            index = ledger[index].parent
        yield tail[::-1], seen
        seen.update([turn.index for turn in tail])


def check_alignment(trajectory: Trajectory) -> None:
    """Check law 2: one length, and a finite logprob exactly on output tokens."""
    n = len(trajectory.token_ids)
    for name in ("loss_mask", "logprobs", "provenance"):
        found = len(getattr(trajectory, name))
        if found != n:
            raise LawViolationError(2, f"column {name} has {found} entries for {n} token ids.")
    wrong = np.isfinite(trajectory.logprobs) != is_output(trajectory.provenance)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise LawViolationError(
            2, f"token {i} has provenance {int(trajectory.provenance[i])} and logprob {trajectory.logprobs[i]}."
        )
    held = sum(turn.own_length for turn in trajectory.path)
    if held != n:
        raise LawViolationError(2, f"the turns of the path hold {held} tokens, the columns {n}.")


def count_trained(trajectory: Trajectory, trained: Counter[int]) -> None:
    """Add the tokens with loss mask 1 of each turn, and check law 3: they are all output."""
    if np.any(trajectory.loss_mask > is_output(trajectory.provenance)):
        raise LawViolationError(3, "a token that the engine did not report as output has loss mask 1.")
    at, mask = 0, trajectory.loss_mask
    for turn in trajectory.path:
        end = at + turn.own_length
        trained[turn.index] += int(np.count_nonzero(mask[at:end]))
        at = end


def check_trained_once(turns: Iterable[Turn], trained: Counter[int]) -> None:
    """Check law 3: each sampled token has mask 1 in exactly one trajectory."""
    for turn in turns:
        expected = 0 if turn.draft.constrained else turn.draft.columns.output
        if trained[turn.index] != expected:
            raise LawViolationError(
                3, f"turn {turn.index}: {trained[turn.index]} of its tokens are trained, expected {expected}."
            )


def _is_sound(trajectory: Trajectory) -> bool:
    """Return whether `check_values` holds on every turn of a path, and `check_alignment` on its columns."""
    logprobs, n = trajectory.logprobs, len(trajectory.token_ids)
    if not len(trajectory.loss_mask) == len(logprobs) == n == sum([turn.own_length for turn in trajectory.path]):
        return False
    in_place = np.array_equal(np.isfinite(logprobs), is_output(trajectory.provenance))
    if not in_place or not n or int(trajectory.token_ids.min()) < 0:
        return in_place and not n
    # what is no number is left out by these two, and is where no output is
    return not (np.fmin.reduce(logprobs) <= SENTINEL_LOGPROB or np.fmax.reduce(logprobs) > ROUNDING)
