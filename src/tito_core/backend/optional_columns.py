"""Validate optional outputs and make columns of them. The same for every backend."""

from __future__ import annotations

import base64
import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from tokenize import TokenError
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tito_core.backend.errors import UNREADABLE
from tito_core.backend.protocol import NO_COLUMNS, RawResponse, ScoredTokens, TokenRequest
from tito_core.backend.values import INT32_MAX, RawReader, floats, integer, short_repr
from tito_core.ledger.columns import ROUNDING, SENTINEL_LOGPROB, Column, Logprobs, TokenIds, check_logprobs
from tito_core.ledger.errors import LawViolationError

_NPY = b"\x93NUMPY"


class ColumnValidation(msgspec.Struct, frozen=True):
    """Checks of laws 2 and 4 on the optional outputs of one answer.

    Attributes:
        reader: Reads values, and builds errors.
        request: The request that was sent.
        ids: The output ids, already checked.
        logprobs: The logprobs of the output ids, already checked.
        vocab_size: Ids must be below it; None if unknown.
    """

    reader: RawReader
    request: TokenRequest
    ids: TokenIds
    logprobs: Logprobs
    vocab_size: int | None = None

    def columns(self, raw: RawResponse) -> Mapping[str, Column]:
        """Return the requested outputs as columns, in offsets of the prompt.

        Raises:
            ProtocolViolationError: An output is missing, has a wrong shape, or contradicts the sampled tokens.
        """
        requested, found = self.request.optional_outputs, dict[str, Column]()
        if not len(self.ids):  # aborted before its first token
            return NO_COLUMNS
        if requested.top_logprobs and self._check_present("top_logprobs", raw.top_logprobs):
            found |= self._top(self._decoded(raw), requested.top_logprobs)
        if requested.prompt_logprobs and self._check_present("prompt_logprobs", raw.prompt_logprobs):
            found["prompt_logprobs"] = self._prompt(self._pairs("prompt_logprobs", raw.prompt_logprobs))
        if requested.routed_experts and self._check_present("routed_experts", raw.routed_experts):
            found["routed_experts"] = self._experts(raw.routed_experts, self._recomputed(raw))
        if requested.sampling_mask and self._check_present("sampling_mask", raw.sampling_mask):
            rows = self._rows("sampling_mask", raw.sampling_mask)
            found["sampling_mask"] = self._mask([self.reader.integers("a sampling_mask", row) for row in rows])
        return found or NO_COLUMNS

    def _check_present(self, name: str, value: object) -> bool:
        """Check that a requested output is in the answer. Return False if it is missing and may be missing."""
        if value is None and not self.request.is_probe:
            raise self.reader.violation(f"Law 4: the answer has no {name}, which were requested.")
        return value is not None

    def _decoded(self, raw: RawResponse) -> list[ScoredTokens]:
        try:
            rows = raw.top_logprobs() if callable(raw.top_logprobs) else raw.top_logprobs
        except UNREADABLE as error:
            raise self.reader.violation(f"Law 2: top_logprobs cannot be read: {error}.") from error
        return [self._pairs("top_logprobs", row) for row in self._rows("top_logprobs", rows)]

    def _pairs(self, name: str, entries: object) -> ScoredTokens:
        """Return (id, logprob) pairs as Python numbers. Invalid ids are kept: `_token` reports them."""
        with contextlib.suppress(msgspec.ValidationError):  # but NumPy's numbers, and what is none
            return msgspec.convert(entries, list[tuple[int | str | None, float | None]])
        if not isinstance(entries, Sequence) or not all(isinstance(e, Sequence) and len(e) == 2 for e in entries):
            raise self.reader.violation(f"Law 2: {name} must be (id, logprob) pairs, not {short_repr(entries)}.")
        logprobs = floats([logprob for _, logprob in entries])
        if logprobs is None:
            raise self.reader.violation(f"Law 4: {name} must have numbers as logprobs, not {short_repr(entries)}.")
        ids = [token if (found := integer(token)) is None else found for token, _ in entries]
        return list(zip(ids, logprobs, strict=True))

    def _rows(self, name: str, rows: object) -> Sequence[Any]:
        if not isinstance(rows, Sequence):
            raise self.reader.violation(
                f"Law 2: {name} must be a list with one entry per token, not {short_repr(rows)}."
            )
        if len(rows) != len(self.ids):
            raise self.reader.violation(
                f"Law 2: the server returned {len(self.ids)} output ids, but {name} of {len(rows)} tokens."
            )
        return rows

    def _top(self, rows: Sequence[ScoredTokens], k: int) -> Mapping[str, Column]:
        distinct = [dict(row) for row in rows]
        for offset, (row, once) in enumerate(zip(rows, distinct, strict=True)):
            if len(once) < k:
                raise self.reader.violation(
                    f"Law 2: {k} top_logprobs per token were requested, but output token {offset} has {len(once)}."
                )
            if len(once) < len(row) and any(once[token] != logprob for token, logprob in row):
                raise self.reader.violation(
                    f"Law 4: the top_logprobs of output token {offset} list an id with two logprobs: {row}."
                )
        width = max(map(len, distinct), default=k)
        scores = np.full((len(rows), width), np.nan)
        ids = np.full((len(rows), width), -1, np.int64)
        for offset, once in enumerate(distinct):
            ids[offset, : len(once)] = [self._token(token, offset) for token in once]
            scores[offset, : len(once)] = [np.nan if value is None else value for value in once.values()]
        scores[~(scores > SENTINEL_LOGPROB)] = np.nan
        # Engines order equal logprobs differently: sort them by id. Masked tokens come last.
        order = np.lexsort((ids, np.where(np.isnan(scores), np.inf, -scores)), axis=1)[:, :k]
        top, values = (np.take_along_axis(each, order, axis=1) for each in (ids, scores))
        top[np.isnan(values)] = -1
        self._check_agreement(top, values)
        start = len(self.request.input_ids)
        return {"top_ids": Column.of(start, top), "top_logprobs": Column.of(start, values)}

    def _check_agreement(self, top: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        """Check that the sampled token is in the top list with its own logprob, or less likely than all of the list."""
        if np.any(values > ROUNDING):
            raise self.reader.violation(f"Law 4: a top logprob is {np.nanmax(values)}, which is not a log-probability.")
        chosen = self.logprobs.astype(np.float64)[:, None]
        same = top == self.ids[:, None]
        least = np.where(np.isnan(values), np.inf, values).min(axis=1, initial=np.inf)
        beyond = ~same.any(axis=1) & (np.isnan(values).any(axis=1) | (chosen[:, 0] > least + ROUNDING))
        differs = (same & ~(np.abs(values - chosen) <= ROUNDING)).any(axis=1)
        for wrong, sentence in (
            (differs, "has logprob {}, but its top_logprobs list another"),
            (beyond, "has logprob {}, but is missing from its top_logprobs"),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                problem = sentence.format(float(self.logprobs[at]))
                listed = np.where(same, values, -np.inf).max(axis=1, initial=-np.inf)
                for side, one, other in (("before", chosen[1:, 0], listed[:-1]), ("after", chosen[:-1, 0], listed[1:])):
                    if len(one) > 1 and np.allclose(one, other, rtol=0, atol=ROUNDING):
                        problem += f" (all are shifted by one: each is that of the token {side} it)"
                pairs = list(zip(top[at].tolist(), values[at].tolist(), strict=True))
                raise self.reader.violation(f"Law 4: output id {int(self.ids[at])} at offset {at} {problem}: {pairs}.")

    def _prompt(self, entries: ScoredTokens) -> Column:
        first = self.request.first_scored
        sent = self.request.input_ids[first:].tolist()
        if len(entries) != len(sent):
            raise self.reader.violation(
                f"Law 2: prompt_logprobs of {len(sent)} tokens from offset {first} were requested, "
                f"but the server returned {len(entries)}."
            )
        placeholder = None if self.request.images is None else self.request.images.placeholder
        inside = np.array([token == placeholder for token in sent], np.bool_)
        for offset, (token, (found, logprob)) in enumerate(zip(sent, entries, strict=True), first):
            if token == placeholder:  # engines report another id here, and a number that means nothing
                continue
            if found != token:
                raise self.reader.violation(
                    f"Law 4: prompt id {token} at offset {offset} was sent, but the server scored {found}."
                )
            if logprob is None:
                raise self.reader.violation(f"Law 4: prompt token {offset} (id {token}) has no logprob.")
        values = np.asarray([logprob for _, logprob in entries], np.float32)
        values[inside] = 0.0
        try:
            check_logprobs(values)
        except LawViolationError as error:
            raise self.reader.violation(str(error)) from error
        values[inside] = np.nan
        return Column.of(first, values)

    def _recomputed(self, raw: RawResponse) -> int:
        """Return how many output tokens precede the newest weights, if the server computed their experts again with it.

        Their logprobs are those of the older weights (SGLang 0.5.23, when weights change in a pause that keeps
        requests), so a trainer that replays the newer ones' experts would compute others. Without a change of weights
        the experts are the same ones.
        """
        spans: Any = list(raw.versions) if raw.recomputed else []
        return int(spans[-1][0]) if len(spans) > 1 else 0

    def _experts(self, value: object, recomputed: int = 0) -> Column:
        """Read routed experts of the whole sequence, or from the requested offset, which some servers ignore.

        Leave out the rows before those that sampled the newest weights' tokens, after `recomputed` tokens.
        """
        start = self.request.first_routed
        whole = len(self.request.input_ids) + len(self.ids) - 1
        is_flat = self.request.optional_outputs.routed_experts == "flat"
        array = self._array(value, (whole - start, whole) if is_flat else (whole, whole - start))
        shape = self.request.optional_outputs.expert_shape
        malformed = array.ndim not in ((2, 3) if is_flat else (3,)) or 0 in array.shape[1:]
        if (malformed and not self.request.is_probe) or shape not in (None, array.shape[1:]):
            expected = "layers, experts" if shape is None else f"{shape[0]}, {shape[1]}"
            raise self.reader.violation(
                f"Law 2: routed_experts have shape {array.shape}, expected ({whole - start}, {expected})."
            )
        if len(array) not in (whole, whole - start):
            raise self.reader.violation(
                f"Law 2: routed_experts have {len(array)} rows, expected {whole} or (from {start}) {whole - start}."
            )
        if array.size and array.min() < 0:
            raise self.reader.violation(f"Law 2: routed_experts contain {array.min()}, which is not an expert index.")
        try:
            first = max(start, len(self.request.input_ids) + recomputed - 1) if recomputed else start
            return Column.of(first, array[first - whole :] if first < whole else array[:0])
        except LawViolationError as error:
            raise self.reader.violation(str(error)) from error

    def _array(self, value: object, lengths: tuple[int, int]) -> npt.NDArray[Any]:
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            return value
        if not isinstance(value, str):
            raise self.reader.violation(
                f"Law 2: routed_experts must be an integer array or base64, not {short_repr(value)}."
            )
        try:
            raw = base64.b64decode(value, validate=True)
            if raw.startswith(_NPY):
                return read_npy(raw, "iu")
            flat = np.frombuffer(raw, "<i4")
        except (ValueError, OverflowError) as error:
            raise self.reader.violation(f"Law 2: routed_experts cannot be read: {error}.") from error
        shape = self.request.optional_outputs.expert_shape
        if shape is not None and len(flat) % (shape[0] * shape[1]) == 0:
            return flat.reshape(-1, *shape)
        rows = next((rows for rows in lengths if rows and len(flat) % rows == 0), 1)
        return flat.reshape(rows, -1)

    def _mask(self, rows: Sequence[Sequence[int]]) -> Column:
        for offset, (token, row) in enumerate(zip(self.ids.tolist(), rows, strict=True)):
            if token not in row:
                raise self.reader.violation(
                    f"Law 4: output id {token} at offset {offset} is not among the {len(row)} ids of its sampling_mask."
                )
            if len(set(row)) < len(row):
                raise self.reader.violation(f"Law 4: the sampling_mask of output token {offset} lists an id twice.")
        width = max(self.request.sampling.top_k, *map(len, rows), 1)
        table = np.full((len(rows), width), -1, np.int64)
        for offset, row in enumerate(rows):
            table[offset, : len(row)] = [self._token(token, offset) for token in row]
        return Column.of(len(self.request.input_ids), table)

    def _token(self, token: int | str | None, offset: int) -> int:
        if type(token) is not int or not 0 <= token <= INT32_MAX:
            raise self.reader.violation(
                f"Law 2: Invalid token id {token!r} in the optional outputs of output token {offset}."
            )
        if self.vocab_size is not None and token >= self.vocab_size:
            raise self.reader.violation(
                f"Law 4: id {token} at output token {offset} is outside the vocabulary of {self.vocab_size} tokens."
            )
        return token


def read_npy(raw: bytes, kinds: str) -> npt.NDArray[Any]:
    """Read a `.npy` of some NumPy `kinds`. Its header is compared with its length, so a false shape allocates nothing.

    Raises:
        ValueError: It cannot be read, or is of another kind.
    """
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(stream)
    except (TokenError, RecursionError, MemoryError) as error:  # raised by Python's parser, which NumPy uses
        raise ValueError("its header cannot be parsed") from error
    body = raw[stream.tell() :]
    if dtype.kind not in kinds or len(body) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(body)} bytes are not the expected array of dtype {dtype} and shape {shape}")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
