"""Per-token columns of one turn: the four that every turn has, packed, and the optional columns."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.provenance import Provenances

TokenIds = npt.NDArray[np.int32]
"""Token ids, dtype int32, shape (n,)."""
Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities, dtype float32, shape (n,)."""
SENTINEL_LOGPROB = -9999.0
"""What vLLM reports for a masked token (`--logprobs-mode processed_logprobs`). It is not a measurement."""
ROUNDING = 1e-4
"""Largest logprob that is accepted, in nats: float32 rounding can put the logprob of a certain token above 0."""
_ID, _LOGPROB = np.dtype("<i4"), np.dtype("<f4")
_NARROW = tuple(np.dtype(kind) for kind in ("u1", "i1", "<u2", "<i2", "<i4"))
_KINDS = (*(dtype.str for dtype in _NARROW), _LOGPROB.str)
_DIMENSIONS = 32
"""Maximum number of dimensions of an optional column: the limit of every NumPy version."""


def check_logprobs(logprobs: Sequence[float] | Logprobs, place: str = "the answer") -> None:
    """Check law 4 on logprobs: finite, at most 0 (within rounding), not a sentinel; `place` is for the error."""
    values = np.asarray(logprobs, np.float32)
    if not len(values) or (
        np.minimum.reduce(values) > SENTINEL_LOGPROB and np.maximum.reduce(values) <= ROUNDING
    ):  # a NaN makes both comparisons false
        return
    offset = int(np.argmax(~np.isfinite(values) | (values > ROUNDING) | (values <= SENTINEL_LOGPROB)))
    raise LawViolationError(
        4, f"{place}: logprob {float(values[offset])} at output offset {offset} is not a log-probability."
    )


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of one turn's own tokens in one immutable buffer: 5 bytes per prompt token, 8 per output token.

    The buffer is little-endian and has no gaps: ids (int32) of the prompt tokens, then of the output tokens; the
    output's logprobs (float32); the prompt's provenance (uint8). All output tokens have one provenance, which the turn
    holds.

    Attributes:
        prompt: Number of prompt tokens that the turn adds (its delta).
        output: Number of output tokens.
        buffer: The columns.
    """

    prompt: int
    output: int
    buffer: bytes

    def __post_init__(self) -> None:
        expected = 5 * self.prompt + 8 * self.output
        if len(self.buffer) != expected or self.prompt < 0 or self.output < 0:
            raise LawViolationError(
                2,
                f"columns of {self.prompt} prompt and {self.output} output tokens take {expected} bytes, "
                f"found {len(self.buffer)}.",
            )

    @classmethod
    def pack(
        cls,
        prompt_ids: npt.ArrayLike,
        prompt_provenance: npt.ArrayLike,
        output_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
    ) -> Columns:
        """Copy arrays of shapes (p,), (p,), (n,), (n,) into one buffer.

        Raises:
            LawViolationError: Law 2: lengths differ, or a column has the wrong shape, type or range.
        """
        prompt, output = _integers("delta ids", prompt_ids, _ID), _integers("output ids", output_ids, _ID)
        provenance = _integers("provenance", prompt_provenance, np.dtype("u1"))
        scores = np.asarray(logprobs)
        if scores.ndim != 1 or (scores.dtype.kind != "f" and len(scores)):
            raise LawViolationError(2, f"logprobs must be floats of shape (n,), not {scores.dtype} {scores.shape}.")
        if len(prompt) != len(provenance):
            raise LawViolationError(2, f"{len(prompt)} delta ids but {len(provenance)} provenances.")
        if len(output) != len(scores):
            raise LawViolationError(2, f"{len(output)} output ids but {len(scores)} logprobs.")
        if scores.dtype != _LOGPROB:
            with np.errstate(over="ignore"):  # a value beyond float32 becomes infinite, which law 4 refuses
                scores = scores.astype(_LOGPROB)
        buffer = b"".join([part.tobytes() for part in (prompt, output, scores, provenance)])
        return cls(len(prompt), len(output), buffer)

    @property
    def ids(self) -> TokenIds:
        """Ids of prompt and output, shape (p + n,)."""
        return np.frombuffer(self.buffer, _ID, self.prompt + self.output)

    @property
    def prompt_ids(self) -> TokenIds:
        """Ids of the delta, shape (p,)."""
        return np.frombuffer(self.buffer, _ID, self.prompt)

    @property
    def output_ids(self) -> TokenIds:
        """Ids that the engine reported, shape (n,)."""
        return np.frombuffer(self.buffer, _ID, self.output, 4 * self.prompt)

    @property
    def logprobs(self) -> Logprobs:
        """Logprobs of `output_ids`, shape (n,)."""
        return np.frombuffer(self.buffer, _LOGPROB, self.output, 4 * (self.prompt + self.output))

    @property
    def prompt_provenance(self) -> Provenances:
        """Provenance of `prompt_ids`, shape (p,)."""
        return np.frombuffer(self.buffer, np.uint8, self.prompt, 4 * self.prompt + 8 * self.output)


CANDIDATES = ("top_ids", "top_logprobs", "sampling_mask")
"""Optional columns of a row for each output token, of the tokens that it was chosen among; short rows are padded."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """An optional column: row i belongs to token `start + i` of the path, counted from its root.

    Known names:
        `prompt_logprobs`, shape (rows,).
        `top_ids` and `top_logprobs`, shape (n, k); -1 and NaN pad short rows.
        `routed_experts`, shape (rows, layers, experts).
        `sampling_mask`, shape (n, k): the ids that a truncated sampler kept; -1 pads short rows.

    Attributes:
        start: Offset of the first row in the path.
        dtype: NumPy's name of the values' type, such as "|u1" or "<f4".
        shape: Shape of the values, (rows, ...).
        buffer: The values, row by row.
    """

    start: int
    dtype: str
    shape: tuple[int, ...]
    buffer: bytes

    def __post_init__(self) -> None:
        if self.dtype not in _KINDS:
            raise LawViolationError(2, f"an optional column has dtype {self.dtype!r}, expected one of {_KINDS}.")
        if len(self.shape) > _DIMENSIONS:
            raise LawViolationError(
                2, f"an optional column has {len(self.shape)} dimensions, expected at most {_DIMENSIONS}."
            )
        size = np.dtype(self.dtype).itemsize
        expected = size * math.prod(self.shape)
        # NumPy refuses such a shape even where another dimension is 0.
        too_large = size * math.prod([n or 1 for n in self.shape]) > sys.maxsize
        if not self.shape or min(self.shape) < 0 or too_large or len(self.buffer) != expected:
            raise LawViolationError(
                2,
                f"an optional column of shape {self.shape} and dtype {self.dtype} takes {expected} bytes, found "
                f"{len(self.buffer)}.",
            )

    @classmethod
    def of(cls, start: int, values: npt.ArrayLike) -> Column:
        """Copy values into the smallest integer dtype that holds them; floats become float32."""
        array = np.asarray(values)
        if array.ndim == 0 or array.dtype.kind not in "iubf":
            raise LawViolationError(
                2, f"an optional column must be numbers of shape (rows, ...), not {array.dtype} {array.shape}."
            )
        with np.errstate(over="ignore"):
            copy = array.astype(_LOGPROB if array.dtype.kind == "f" else _narrowest(array))
        if array.dtype.kind == "f" and np.any(np.isinf(copy) & np.isfinite(array)):
            raise LawViolationError(2, "an optional column holds a number outside the range of float32.")
        return cls(start, copy.dtype.str, copy.shape, copy.tobytes())

    @property
    def rows(self) -> int:
        """Number of rows, one for each token that has a value."""
        return self.shape[0]

    @property
    def values(self) -> npt.NDArray[np.generic]:
        """The values, shape (rows, ...), read-only."""
        return np.frombuffer(self.buffer, self.dtype).reshape(self.shape)


def _narrowest(array: npt.NDArray[np.generic]) -> np.dtype[Any]:
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for dtype in _NARROW:
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return dtype
    raise LawViolationError(2, f"an optional column holds {low} to {high}, outside the range of int32.")


def _integers(name: str, values: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[np.generic]:
    """Convert whole numbers to `dtype`. Raise if one of them does not fit."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise LawViolationError(2, f"{name} must have shape (n,), not {array.shape}.")
    if array.dtype == dtype:
        return array
    if not len(array):
        return array.astype(dtype)
    if array.dtype.kind not in "iu":
        raise LawViolationError(2, f"{name} must be whole numbers, not {array.dtype}.")
    bounds = np.iinfo(dtype)
    low, high = int(array.min()), int(array.max())
    if low < bounds.min or high > bounds.max:
        raise LawViolationError(2, f"{name} hold {low} to {high}, outside {bounds.min} to {bounds.max}.")
    return array.astype(dtype)
