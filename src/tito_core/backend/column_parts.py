"""Columns of a completion that came in several responses, since its engine was told to abort it and it went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tito_core.backend.protocol import NO_COLUMNS
from tito_core.ledger.columns import Column


def joined_columns(parts: Sequence[Mapping[str, Column]], prompt_length: int) -> Mapping[str, Column]:
    """Put the columns of one completion's responses together: of each row that of the first response to have it.

    A later response was asked with the earlier ones' tokens at the end of its prompt, and tells of these once more; but
    they were sampled from what the earlier one told.

    Args:
        parts: Columns of each response, in order, in offsets of one path.
        prompt_length: Tokens of the first one's prompt, which alone has prompt logprobs.
    """
    found: dict[str, Column] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pieces = [part[name] for part in parts if name in part]
        start = stop = pieces[0].start
        rows: list[npt.NDArray[Any]] = []
        for piece in pieces:
            last = prompt_length if name == "prompt_logprobs" else piece.start + piece.rows
            rows.append(piece.values[stop - piece.start : last - piece.start])
            stop = max(stop, last)
        if rows[0].ndim == 2:
            rows = [_widened(each, max(row.shape[1] for row in rows)) for each in rows]
        found[name] = Column.of(start, np.concatenate(rows))
    return found or NO_COLUMNS


def _widened(rows: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Fill rows up with -1: a tie may have left one response more to choose from than another."""
    if rows.shape[1] == width:
        return rows
    filled = np.full((len(rows), width), -1, np.int64)
    filled[:, : rows.shape[1]] = rows
    return filled
