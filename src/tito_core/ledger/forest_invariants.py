"""The laws of a whole ledger, as functions: each turn's laws, and how turns and paths fit together.

Tests, the conformance suite and `tito verify` call `check_ledger`. Each function raises `LawViolationError` with the
law, the turn, the offset, and the expected and found values.
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
    check_stored,
    check_values,
)
from tito_core.ledger.provenance import is_output
from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import Turn

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger

PIECE = 16
"""Number of a path's turns that are assembled and checked at once."""


def check_ledger(ledger: Ledger) -> None:
    """Check every law that can be checked on a ledger alone: 1 to 4 and 8 to 10.

    Raises:
        LawViolationError: The ledger breaks a law.
    """
    turns = list(ledger)
    extended: set[int | None] = set()
    for turn in turns:
        check_prefix(ledger, turn)
        check_facts(turn.draft, path_length=turn.path_length - turn.own_length, turn=turn.index)
        check_branch(turn, first=turn.parent not in extended)
        if turn.draft.media:
            check_stored(turn.draft.media, ledger.images, turn=turn.index)
        extended.add(turn.parent)
    check_media_ids(ledger)
    trained: Counter[int] = Counter()
    for path, context in _tails(ledger):
        for start in range(0, len(path), PIECE):  # larger arrays would need new memory pages
            piece = assemble(path[start : start + PIECE], context=context, train_constrained=False)
            if not _is_sound(piece):  # checks all turns at once; the loop below finds the wrong one
                for turn in piece.path:
                    check_values(turn.draft, turn=turn.index)
                check_alignment(piece)
            count_trained(piece, trained)
    check_trained_once(turns, trained)
    for note in ledger.annotations:
        if note.turn is not None and not 0 <= note.turn < len(turns):
            raise LawViolationError(
                8, f"annotation {note.name!r} refers to turn {note.turn}, but the ledger has {len(turns)} turns."
            )


def _tails(ledger: Ledger) -> Iterator[tuple[list[Turn], set[int]]]:
    """Yield each path's last turns, and the indices of turns that earlier paths have.

    A tail goes back over at most `PIECE` turns that earlier paths have. Whole paths would take quadratic time where
    many leaves share a long trunk (law 12).
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


def check_media_ids(ledger: Ledger) -> None:
    """Check law 4 on placeholders that the certificate names: the media spans hold all of a prompt's, and nothing else.

    Turns without media are checked where content is inert; with `content_tokens="as-template"` a text may spell one.
    """
    known = np.unique(np.array(ledger.header.media_ids, np.int32))
    inert = (ledger.header.certificate or {}).get("content_tokens") == "inert"
    for turn in ledger if len(known) else ():
        ids, start = turn.draft.prompt_ids, turn.path_length - turn.own_length
        if not turn.draft.media and not inert:
            continue
        inside = np.zeros(len(ids), np.bool_)
        for span in turn.draft.media:
            inside[span.offset - start : span.offset - start + span.length] = True
        # np.isin would take the time of the whole list in each turn; a hostile file may list millions (law 12).
        is_placeholder = known[np.minimum(np.searchsorted(known, ids), len(known) - 1)] == ids
        if np.any(wrong := is_placeholder != inside):
            at = int(np.argmax(wrong))
            reason = "no media span holds it" if is_placeholder[at] else "a media span holds it"
            raise LawViolationError(
                4,
                f"turn {turn.index}: token {start + at} has id {ids[at]} and {reason}, but the media spans must hold "
                f"exactly the placeholders of the prompt, which have the ids {known[:8].tolist()}.",
            )


def check_alignment(trajectory: Trajectory) -> None:
    """Check law 2: all columns have one length, and exactly the output tokens have a finite logprob."""
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
    """Count each turn's tokens with loss mask 1 in `trained`, and check law 3: they are all output tokens."""
    if np.any(trajectory.loss_mask > is_output(trajectory.provenance)):
        raise LawViolationError(3, "a token that the engine did not report as output has loss mask 1.")
    at, mask = 0, trajectory.loss_mask
    for turn in trajectory.path:
        end = at + turn.own_length
        trained[turn.index] += int(np.count_nonzero(mask[at:end]))
        at = end


def check_trained_once(turns: Iterable[Turn], trained: Counter[int]) -> None:
    """Check law 3: each sampled token has loss mask 1 in exactly one trajectory."""
    for turn in turns:
        expected = 0 if turn.draft.constrained else turn.draft.columns.output
        if trained[turn.index] != expected:
            raise LawViolationError(
                3, f"turn {turn.index}: {trained[turn.index]} of its tokens are trained, expected {expected}."
            )


def _is_sound(trajectory: Trajectory) -> bool:
    """Return whether every turn passes `check_values`, and the columns pass `check_alignment`."""
    logprobs, n = trajectory.logprobs, len(trajectory.token_ids)
    if not len(trajectory.loss_mask) == len(logprobs) == n == sum([turn.own_length for turn in trajectory.path]):
        return False
    aligned = np.array_equal(np.isfinite(logprobs), is_output(trajectory.provenance))
    if not aligned or not n or int(trajectory.token_ids.min()) < 0:
        return aligned and not n
    # fmin and fmax skip NaN, which only prompt tokens have here
    return not (np.fmin.reduce(logprobs) <= SENTINEL_LOGPROB or np.fmax.reduce(logprobs) > ROUNDING)
