"""What an engine says beside sampled tokens and their logprobs, checked and made columns. The same for every engine."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tito_core.backend.errors import UNREADABLE
from tito_core.backend.protocol import NO_COLUMNS, TokenRequest
from tito_core.ledger.columns import Column, Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.invariants import ROUNDING, SENTINEL_LOGPROB, check_logprobs

if TYPE_CHECKING:
    from tito_core.backend.answer import Checks

Scored = Sequence[tuple[int | str | None, float | None]]
"""(id, logprob) pairs; a token that was masked has None, -9999 (vLLM) or float32's lowest (SGLang)."""
_INT32_MAX = 2**31 - 1
_NPY = b"\x93NUMPY"


class Beside(msgspec.Struct, frozen=True):
    """What an engine said beside the output's ids and logprobs, not yet believed. None where it left a thing out.

    Attributes:
        top: Decodes, for each output token, the likeliest ones in any order; the sampled one may be added to them.
        prompt: The prompt's own tokens from `TokenRequest.first_scored` on.
        experts: Base64 of routed experts: a whole `.npy`, or bare little-endian int32.
        mask: For each output token the ids that it was chosen from.
    """

    top: Callable[[], Sequence[Scored]] | None = None
    prompt: Scored | None = None
    experts: str | None = None
    mask: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class BesideChecks:
    """Checks of laws 2 and 4 on what was wanted of one answer, which hold for columns as for logprobs.

    Attributes:
        checks: Names backend and request in errors.
        request: What was asked.
        ids: The output's ids, already checked.
        logprobs: Theirs.
    """

    checks: Checks
    request: TokenRequest
    ids: TokenIds
    logprobs: Logprobs

    def columns(self, said: Beside) -> Mapping[str, Column]:
        """Give what was wanted as columns, in offsets of the prompt.

        Raises:
            ProtocolViolationError: It is missing, of another shape, or does not agree with what was sampled.
        """
        wanted, found = self.request.wanted, dict[str, Column]()
        if not len(self.ids):  # aborted before its first token
            return NO_COLUMNS
        if wanted.top_logprobs and self._is_there("top_logprobs", said.top):
            found |= self._top(self._decoded(said), wanted.top_logprobs)
        if wanted.prompt_logprobs and self._is_there("prompt_logprobs", said.prompt):
            found["prompt_logprobs"] = self._prompt(said.prompt or ())
        if wanted.routed_experts and self._is_there("routed_experts", said.experts):
            found["routed_experts"] = self._experts(said.experts or "")
        if wanted.sampling_mask and self._is_there("sampling_mask", said.mask):
            found["sampling_mask"] = self._mask(said.mask or ())
        return found or NO_COLUMNS

    def _is_there(self, name: str, value: object) -> bool:
        if value is None and not self.request.lenient:
            raise self.checks.violation(f"Law 4: the answer holds no {name}, though they were asked for.")
        return value is not None

    def _decoded(self, said: Beside) -> Sequence[Scored]:
        try:
            return said.top() if said.top is not None else ()
        except UNREADABLE as error:
            raise self.checks.violation(f"Law 2: top_logprobs cannot be read: {error}.") from error

    def _rows(self, name: str, rows: Sequence[Any]) -> None:
        if len(rows) != len(self.ids):
            raise self.checks.violation(f"Law 2: {len(self.ids)} output ids, but {name} of {len(rows)} tokens.")

    def _top(self, rows: Sequence[Scored], k: int) -> Mapping[str, Column]:
        self._rows("top_logprobs", rows)
        distinct = [dict(row) for row in rows]
        for offset, (row, once) in enumerate(zip(rows, distinct, strict=True)):
            if len(once) < k:
                raise self.checks.violation(
                    f"Law 2: {k} top_logprobs a token were asked for, output token {offset} has {len(once)}."
                )
            if len(once) < len(row) and any(once[token] != logprob for token, logprob in row):
                raise self.checks.violation(f"Law 4: output token {offset} has a top id with two logprobs: {row}.")
        width = max(map(len, distinct), default=k)
        scores = np.full((len(rows), width), np.nan)
        ids = np.full((len(rows), width), -1, np.int64)
        for offset, once in enumerate(distinct):
            ids[offset, : len(once)] = [self._token(token, offset) for token in once]
            scores[offset, : len(once)] = [np.nan if value is None else value for value in once.values()]
        scores[~(scores > SENTINEL_LOGPROB)] = np.nan
        # The lower id first among equals, which engines list in orders of their own; what is masked comes last.
        order = np.lexsort((ids, np.where(np.isnan(scores), np.inf, -scores)), axis=1)[:, :k]
        top, values = (np.take_along_axis(each, order, axis=1) for each in (ids, scores))
        top[np.isnan(values)] = -1
        self._agrees(top, values)
        start = len(self.request.input_ids)
        return {"top_ids": Column.of(start, top), "top_logprobs": Column.of(start, values)}

    def _agrees(self, top: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        """Check the sampled token against the likeliest: among them with its own logprob, or less likely than all."""
        if np.any(values > ROUNDING):
            raise self.checks.violation(f"Law 4: a top logprob is {np.nanmax(values)}, which is no log-probability.")
        chosen = self.logprobs.astype(np.float64)[:, None]
        same = top == self.ids[:, None]
        least = np.where(np.isnan(values), np.inf, values).min(axis=1, initial=np.inf)
        beyond = ~same.any(axis=1) & (np.isnan(values).any(axis=1) | (chosen[:, 0] > least + ROUNDING))
        differs = (same & ~(np.abs(values - chosen) <= ROUNDING)).any(axis=1)
        for wrong, sentence in (
            (differs, "has logprob {} and among the likeliest another"),
            (beyond, "has logprob {}, which is among the likeliest, and is not one of them"),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                words = sentence.format(float(self.logprobs[at]))
                pairs = list(zip(top[at].tolist(), values[at].tolist(), strict=True))
                raise self.checks.violation(f"Law 4: output id {int(self.ids[at])} at offset {at} {words}: {pairs}.")

    def _prompt(self, entries: Scored) -> Column:
        first = self.request.first_scored
        sent = self.request.input_ids[first:].tolist()
        if len(entries) != len(sent):
            raise self.checks.violation(
                f"Law 2: prompt_logprobs of {len(sent)} tokens from offset {first} were asked for, "
                f"the server gave {len(entries)}."
            )
        for offset, (token, (found, logprob)) in enumerate(zip(sent, entries, strict=True), first):
            if found != token:
                raise self.checks.violation(
                    f"Law 4: prompt id {token} at offset {offset} was sent, the server scored {found}."
                )
            if logprob is None:
                raise self.checks.violation(f"Law 4: prompt token {offset} has no logprob (id {token}).")
        values = np.asarray([logprob for _, logprob in entries], np.float32)
        try:
            check_logprobs(values)
        except LawViolationError as error:
            raise self.checks.violation(str(error)) from error
        return Column.of(first, values)

    def _experts(self, text: str) -> Column:
        """Read routed experts of the whole sequence, or from the offset that was asked for: some servers ignore it."""
        start = self.request.first_routed
        whole = len(self.request.input_ids) + len(self.ids) - 1
        array = self._array(text, (whole, whole - start))
        shape = self.request.wanted.expert_shape
        if (array.ndim != 3 and not self.request.lenient) or shape not in (None, array.shape[1:]):
            expected = "layers, experts" if shape is None else f"{shape[0]}, {shape[1]}"
            raise self.checks.violation(
                f"Law 2: routed_experts have shape {array.shape}, expected ({whole - start}, {expected})."
            )
        if len(array) not in (whole, whole - start):
            raise self.checks.violation(
                f"Law 2: routed_experts have {len(array)} rows, expected {whole}, or {whole - start} from {start} on."
            )
        try:
            return Column.of(start, array[start:] if len(array) == whole else array)
        except LawViolationError as error:
            raise self.checks.violation(str(error)) from error

    def _array(self, text: str, lengths: tuple[int, int]) -> npt.NDArray[Any]:
        try:
            raw = base64.b64decode(text, validate=True)
            if raw.startswith(_NPY):
                return _read_npy(raw)
            flat = np.frombuffer(raw, "<i4")
        except (ValueError, OverflowError) as error:
            raise self.checks.violation(f"Law 2: routed_experts cannot be read: {error}.") from error
        shape = self.request.wanted.expert_shape
        if shape is not None and len(flat) % (shape[0] * shape[1]) == 0:
            return flat.reshape(-1, *shape)
        rows = next((rows for rows in lengths if rows and len(flat) % rows == 0), 1)
        return flat.reshape(rows, -1)

    def _mask(self, rows: Sequence[Sequence[int]]) -> Column:
        self._rows("sampling_mask", rows)
        for offset, (token, row) in enumerate(zip(self.ids.tolist(), rows, strict=True)):
            if token not in row:
                raise self.checks.violation(
                    f"Law 4: output id {token} at offset {offset} is not among the {len(row)} ids that its "
                    "sampling_mask says it was chosen from."
                )
            if len(set(row)) < len(row):
                raise self.checks.violation(f"Law 4: the sampling_mask of output token {offset} holds an id twice.")
        width = max(self.request.sampling.top_k, *map(len, rows), 1)
        table = np.full((len(rows), width), -1, np.int64)
        for offset, row in enumerate(rows):
            table[offset, : len(row)] = [self._token(token, offset) for token in row]
        return Column.of(len(self.request.input_ids), table)

    def _token(self, token: int | str | None, offset: int) -> int:
        if not isinstance(token, int) or not 0 <= token <= _INT32_MAX:
            raise self.checks.violation(f"Law 2: {token!r}, told beside output token {offset}, is no token.")
        return token


def _read_npy(raw: bytes) -> npt.NDArray[Any]:
    """Read an integer `.npy`; its header is held to its length first, so that none makes room for what is not there."""
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(stream)
    except (TokenError, RecursionError, MemoryError) as error:  # of Python's own parser, which NumPy lets through
        raise ValueError("its header cannot be parsed") from error
    body = raw[stream.tell() :]
    if dtype.kind not in "iu" or len(body) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(body)} bytes are no {dtype} of shape {shape}")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
