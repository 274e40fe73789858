"""A trajectory: one root-to-leaf path of a ledger, flattened to index-aligned columns for a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tito_core.ledger.branch import Branch
from tito_core.ledger.columns import Column, Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.provenance import Provenance, Provenances
from tito_core.ledger.turn import Semantics, Turn, VersionSpan

G = TypeVar("G", bound=np.generic)


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
        branch: Why the path left an older one, and where; None for one that did not.
        versions: Weight versions of the sampled tokens, in offsets of these columns; they cover just those.
        semantics: What the logprobs mean: the distinct ones, in order of appearance (law 11).
        columns: Optional columns by name, each in pieces, whose offsets are those of these columns.
    """

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Logprobs
    provenance: Provenances
    segments: tuple[Segment, ...]
    turns: tuple[int, ...]
    context_turns: frozenset[int]
    branch: Branch | None
    versions: tuple[VersionSpan, ...]
    semantics: tuple[Semantics, ...]
    columns: Mapping[str, tuple[Column, ...]]

    def __len__(self) -> int:
        return len(self.token_ids)

    def count(self, provenance: Provenance) -> int:
        """Count the tokens of one provenance."""
        return int(np.count_nonzero(self.provenance == provenance))

    def column(self, name: str, fill: float) -> npt.NDArray[np.generic]:
        """Give an optional column for every token, shape (n, ...), with `fill` where a turn did not bring it.

        Raises:
            KeyError: No turn brought it.
            LawViolationError: Its rows have several shapes, or `fill` does not fit its dtype.
        """
        pieces = self.columns[name]
        shapes = {piece.values.shape[1:] for piece in pieces}
        if len(shapes) > 1:
            raise LawViolationError(2, f"optional column {name!r} has rows of shapes {sorted(shapes)}.")
        dtype = np.result_type(*(piece.values.dtype for piece in pieces))
        if dtype.kind != "f" and not np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max:
            raise LawViolationError(2, f"{fill} does not fit optional column {name!r} of dtype {dtype}.")
        whole = np.full((len(self), *shapes.pop()), fill, dtype)
        for piece in pieces:
            whole[piece.start : piece.start + len(piece.values)] = piece.values
        return whole


def assemble(path: Sequence[Turn], *, context: frozenset[int], train_constrained: bool) -> Trajectory:
    """Flatten a root-to-leaf path; turns in `context` keep provenance and logprobs but get mask 0."""
    longest = max((max(t.draft.columns.prompt, t.draft.columns.output) for t in path), default=0)
    unsampled, rows = _constant(np.nan, longest, np.float32), _Rows(longest)
    ids, masks, provenances, logprobs = ([_EMPTY_IDS], [_EMPTY_BYTES], [_EMPTY_BYTES], [_EMPTY_LOGPROBS])
    segments: list[Segment] = []
    versions: list[VersionSpan] = []
    at = 0
    for turn in path:
        columns, kind = turn.draft.columns, turn.output_provenance
        trained = turn.index not in context and (kind == Provenance.SAMPLED or train_constrained)
        prompt, output = columns.prompt, columns.output
        ids.append(columns.ids)
        masks += [rows[0][:prompt], rows[int(trained)][:output]]
        provenances += [columns.prompt_provenance, rows[kind][:output]]
        logprobs += [unsampled[:prompt], columns.logprobs]
        middle = at + prompt
        segments += [
            Segment(turn.index, at, middle, False),
            Segment(turn.index, middle, middle + output, True),
        ]
        versions += [VersionSpan(middle + s.start, middle + s.stop, s.version) for s in turn.draft.engine.versions]
        at = middle + output
    indices = tuple(turn.index for turn in path)
    return Trajectory(
        token_ids=_joined(ids),
        loss_mask=_joined(masks),
        logprobs=_joined(logprobs),
        provenance=_joined(provenances),
        segments=tuple(segments),
        turns=indices,
        context_turns=context.intersection(indices),
        branch=next((turn.draft.branch for turn in reversed(path) if turn.draft.branch is not None), None),
        versions=tuple(versions),
        semantics=tuple(dict.fromkeys(turn.draft.engine.semantics for turn in path)),
        columns=_optional(path),
    )


_EMPTY_IDS = np.zeros(0, np.int32)
_EMPTY_BYTES = np.zeros(0, np.uint8)
_EMPTY_LOGPROBS = np.zeros(0, np.float32)


class _Rows(dict[int, npt.NDArray[np.uint8]]):
    """Constant uint8 rows to slice, made as they are asked for."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __missing__(self, value: int) -> npt.NDArray[np.uint8]:
        row = self[value] = _constant(value, self._length, np.uint8)
        return row


def _constant(value: float, length: int, dtype: type[G]) -> npt.NDArray[G]:
    return np.full(length, value, dtype)


def _joined(parts: Sequence[npt.NDArray[G]]) -> npt.NDArray[G]:
    column = np.concatenate(parts)
    column.setflags(write=False)
    return column


def _optional(path: Sequence[Turn]) -> dict[str, tuple[Column, ...]]:
    found: dict[str, tuple[Column, ...]] = {}
    for turn in path:
        for name, column in turn.draft.extras.items():
            found[name] = (*found.get(name, ()), column)
    return found
