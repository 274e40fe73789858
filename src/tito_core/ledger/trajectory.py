"""A trajectory: one root-to-leaf path of a ledger, flattened to index-aligned columns for a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tito_core.ledger.provenance import Provenance, Provenances, loss_mask
from tito_core.ledger.turn import Logprobs, TokenIds, Turn


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one turn: its delta (`is_output` False) or its output (True).

    `start` and `stop` are offsets into the trajectory's columns.
    """

    turn: int
    start: int
    stop: int
    is_output: bool


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Columns of one length `n`, index-aligned (law 2).

    Attributes:
        token_ids: int32, shape (n,).
        loss_mask: uint8, shape (n,): 1 where the token is trained here.
        logprobs: float32, shape (n,): the engine's own; NaN on every token that it did not sample.
        provenance: uint8, shape (n,): a `Provenance` a token.
        segments: Runs that tile the columns, in order.
        turns: Indices of the turns on this path.
        context_turns: Those of them that an earlier trajectory trains, so that here they are context.
    """

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Logprobs
    provenance: Provenances
    segments: tuple[Segment, ...]
    turns: tuple[int, ...]
    context_turns: frozenset[int]

    def __len__(self) -> int:
        return len(self.token_ids)

    def count(self, provenance: Provenance) -> int:
        """Count the tokens of one provenance."""
        return int(np.count_nonzero(self.provenance == provenance))


def assemble(path: Sequence[Turn], *, context: frozenset[int], train_constrained: bool) -> Trajectory:
    """Flatten a root-to-leaf path; turns in `context` keep provenance and logprobs but get mask 0."""
    length = path[-1].path_length if path else 0
    ids = np.empty(length, np.int32)
    logprobs = np.full(length, np.nan, np.float32)
    provenance = np.empty(length, np.uint8)
    trained = np.zeros(length, np.uint8)
    segments: list[Segment] = []
    at = 0
    for turn in path:
        draft = turn.draft
        middle, end = at + len(draft.prompt_ids), at + turn.own_length
        ids[at:middle], ids[middle:end] = draft.prompt_ids, draft.output_ids
        provenance[at:middle], provenance[middle:end] = draft.prompt_provenance, turn.output_provenance
        logprobs[middle:end] = draft.logprobs
        trained[at:end] = turn.index not in context
        segments += [Segment(turn.index, at, middle, False), Segment(turn.index, middle, end, True)]
        at = end
    mask = loss_mask(provenance, train_constrained=train_constrained) * trained
    for column in (ids, logprobs, provenance, mask):
        column.setflags(write=False)
    indices = tuple(turn.index for turn in path)
    return Trajectory(ids, mask, logprobs, provenance, tuple(segments), indices, context.intersection(indices))
