"""A trajectory: one root-to-leaf path of a ledger, flattened to index-aligned columns for a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tito_core.display import as_html
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.provenance import Provenance, Provenances
from tito_core.ledger.turn import Branch, Image, MediaSpan, Semantics, Turn, VersionSpan


class Segment(NamedTuple):
    """The delta (`is_output` False) or the output (True) of one turn.

    `start` and `stop` are offsets into the trajectory's columns.
    """

    turn: int
    start: int
    stop: int
    is_output: bool


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Index-aligned columns of one length `n` (law 2), and the turns that they come from.

    Attributes:
        path: The turns, from the root to a leaf.
        token_ids: int32, shape (n,).
        loss_mask: int64, shape (n,): 1 where the token is trained here.
        logprobs: float32, shape (n,): as the engine reported them; NaN on tokens that it did not sample.
        provenance: uint8, shape (n,): a `Provenance` value per token.
        context_turns: Turns of the path that an earlier trajectory trains; here their loss mask is 0.
        images: The image of each of `media`, in order; a medium whose bytes the ledger does not hold is left out.
        tokenizer: Name of the ledger's tokenizer, with which a notebook shows text; None if it names none.
    """

    path: tuple[Turn, ...]
    token_ids: TokenIds
    loss_mask: npt.NDArray[np.int64]
    logprobs: Logprobs
    provenance: Provenances
    context_turns: frozenset[int]
    images: tuple[Image, ...] = ()
    tokenizer: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        trained = int(np.count_nonzero(self.loss_mask))
        sampled = self.count(Provenance.SAMPLED) + self.count(Provenance.CONSTRAINED)
        turns, tokens = count(len(self.path), "turn"), count(len(self), "token")
        return f"<Trajectory: {turns}, {tokens}, {sampled} sampled, {trained} trained here>"

    def _repr_html_(self) -> str | None:
        """Return the HTML that a notebook shows."""
        return as_html(self)

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the turns of the path."""
        return tuple(turn.index for turn in self.path)

    @property
    def agent(self) -> str | None:
        """The agent of the last turn; see `Draft.agent`."""
        return self.path[-1].draft.agent

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments that tile the columns: each turn's delta, then its output."""
        segments, start = [], 0
        for turn in self.path:
            middle = start + turn.draft.columns.prompt
            end = middle + turn.draft.columns.output
            segments += [Segment(turn.index, start, middle, False), Segment(turn.index, middle, end, True)]
            start = end
        return tuple(segments)

    @property
    def branch(self) -> Branch | None:
        """The path's last branch record, or None if it never branched."""
        return next((turn.draft.branch for turn in reversed(self.path) if turn.draft.branch is not None), None)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Weight versions of the output tokens, and of no others, as offsets into the columns (law 10).

        Those of tokens that an adapter sampled name it too; see `Draft.versions`.
        """
        return tuple(
            VersionSpan(start + span.start, start + span.stop, span.version)
            for turn in self.path
            for start in [turn.path_length - turn.draft.columns.output]
            for span in turn.draft.versions
        )

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """Spans of the images' placeholders, as offsets into the columns."""
        return tuple(span for turn in self.path for span in turn.draft.media)

    @property
    def semantics(self) -> tuple[Semantics, ...]:
        """Distinct semantics of the logprobs, in order of appearance (law 11)."""
        return tuple(dict.fromkeys(turn.draft.engine.semantics for turn in self.path))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the optional columns that at least one turn has, in order of appearance."""
        return tuple(dict.fromkeys(name for turn in self.path for name in turn.draft.extras))

    def count(self, provenance: Provenance) -> int:
        """Return the number of tokens of one provenance."""
        return int(np.count_nonzero(self.provenance == provenance))

    def column(self, name: str, fill: float) -> npt.NDArray[np.generic]:
        """Return an optional column, shape (n, ...), with `fill` on tokens that have no row.

        A `sampling_mask` is as wide as its longest row.

        Raises:
            KeyError: No turn has the column.
            LawViolationError: Its rows have different shapes, or `fill` does not fit its dtype.
        """
        pieces = [turn.draft.extras[name] for turn in self.path if name in turn.draft.extras]
        if not pieces:
            raise KeyError(f"No turn has a column {name!r}. Available: {', '.join(self.column_names) or 'none'}.")
        pieces = [piece for piece in pieces if piece.rows] or pieces[:1]
        shapes = {piece.shape[1:] for piece in pieces}
        dtype = np.result_type(*(piece.dtype for piece in pieces))
        if name == "sampling_mask" and len(shapes) > 1:  # ties for the last place make some rows longer
            shapes, dtype = {max(shapes)}, np.result_type(dtype, np.int8)
        if len(shapes) > 1:
            raise LawViolationError(2, f"optional column {name!r} has rows of different shapes: {sorted(shapes)}.")
        if dtype.kind != "f" and not (np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max and fill == int(fill)):
            raise LawViolationError(2, f"{fill} does not fit optional column {name!r} of dtype {dtype}.")
        whole = np.full((len(self), *shapes.pop()), fill, dtype)
        for piece in pieces:
            rows = whole[piece.start : piece.start + piece.rows]
            if rows.shape != piece.shape:
                rows[:] = -1
                rows = rows[:, : piece.shape[1]]
            rows[:] = piece.values
        return whole


class Trajectories(list[Trajectory]):
    """The trajectories of a ledger. They can be called too, since `Ledger.trajectories` was a method before."""

    def __init__(self, trajectories: Callable[..., Iterable[Trajectory]]) -> None:
        super().__init__(trajectories())
        self._trajectories = trajectories

    def __call__(self, *, train_constrained: bool = False) -> list[Trajectory]:
        """Return them; with `train_constrained`, tokens that were sampled under a grammar are trained too."""
        return list(self._trajectories(train_constrained=train_constrained))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle them as a list."""
        return list, (list(self),)


_NO_IMAGES: Mapping[bytes, Image] = MappingProxyType({})


def assemble(
    path: Sequence[Turn],
    *,
    context: Set[int],
    train_constrained: bool,
    images: Mapping[bytes, Image] = _NO_IMAGES,
    tokenizer: str | None = None,
) -> Trajectory:
    """Flatten a root-to-leaf path, or a piece of one. Turns in `context` get loss mask 0.

    `images` are the ledger's, by digest, and `tokenizer` is the name in its header.
    """
    n = sum(turn.own_length for turn in path)
    token_ids, loss_mask = np.empty(n, np.int32), np.zeros(n, np.int64)  # with uint8, `sum(loss_mask)` overflows
    logprobs, provenance = np.full(n, np.nan, np.float32), np.empty(n, np.uint8)
    start = 0
    for turn in path:
        columns, constrained = turn.draft.columns, turn.draft.constrained
        middle, end = start + columns.prompt, start + columns.prompt + columns.output
        token_ids[start:end] = columns.ids
        provenance[start:middle] = columns.prompt_provenance
        provenance[middle:end] = Provenance.CONSTRAINED if constrained else Provenance.SAMPLED
        logprobs[middle:end] = columns.logprobs
        loss_mask[middle:end] = (train_constrained or not constrained) and turn.index not in context
        start = end
    for column in (token_ids, loss_mask, logprobs, provenance):
        column.flags.writeable = False
    return Trajectory(
        path=tuple(path),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        provenance=provenance,
        context_turns=frozenset([turn.index for turn in path if turn.index in context]),
        images=tuple([images[span.sha256] for turn in path for span in turn.draft.media if span.sha256 in images]),
        tokenizer=tokenizer,
    )


def count(number: int, one: str, several: str = "") -> str:
    """Return a number with its noun."""
    return f"{number} {one if number == 1 else several or one + 's'}"
