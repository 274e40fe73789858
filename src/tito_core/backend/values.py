"""Check values: names and numbers that users type, and what a server reports. An error is one sentence."""

from __future__ import annotations

import difflib
import math
import operator
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from tito_core.backend.errors import BackendError, ProtocolViolationError
from tito_core.ledger.columns import ROUNDING, Logprobs, TokenIds, check_logprobs
from tito_core.ledger.errors import LawViolationError, TITOError

T = TypeVar("T")
_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class InvalidValueError(TITOError, ValueError):
    """A user's value is not allowed; the message names the field, the value and the allowed values."""


def short_repr(value: object) -> str:
    """Return a value's `repr` for an error, shortened; only its type if `repr` fails."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, an integer of thousands of digits, a `__repr__` that raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def positive_seconds(name: str, given: Any, allowed: str = "a positive number of seconds") -> float:
    """Return a user's time in seconds.

    Raises:
        InvalidValueError: Not a positive finite number.
    """
    try:
        seconds = float(given) if isinstance(given, int | float) and not isinstance(given, bool) else math.nan
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidValueError(f"{name} must be {allowed}, not {short_repr(given)}.")
    return seconds


def seconds_or_zero(name: str, given: Any) -> float:
    """Return a user's time in seconds, which may be 0.

    Raises:
        InvalidValueError: Not a finite number, or negative.
    """
    is_zero = given == 0 and isinstance(given, int | float) and not isinstance(given, bool)
    return 0.0 if is_zero else positive_seconds(name, given, "a number of seconds, or 0")


def at_least(name: str, given: Any, least: int, allowed: str = "") -> int:
    """Return a user's whole number.

    Raises:
        InvalidValueError: Not a whole number, or less than `least`.
    """
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        allowed = allowed or f"a whole number, at least {least}"
        raise InvalidValueError(f"{name} must be {allowed}, not {short_repr(given)}.")
    return given


class TypedValues(BaseModel):
    """Base of models that users write as arguments or dicts.

    Raises:
        InvalidValueError: A name is unknown, or a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # type checkers take the fields as arguments

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise InvalidValueError(sentence(error)) from None

        __init__.__pydantic_base_init__ = True  # so that `model_validate` does not call it


def sentence(error: ValidationError) -> str:
    """Return pydantic's first problem as one sentence."""
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] in _BY_NAME:
        return f"{'.'.join(map(str, first['loc']))} {_BY_NAME[first['type']]}."
    same = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]  # a union has one per member
    allowed = " or ".join(dict.fromkeys(_allowed(problem["msg"]) for problem in same))
    where = "".join(f"[{part}]" if isinstance(part, int) else part for part in first["loc"][: _depth(first["loc"])])
    return f"{where} must {allowed}, not {short_repr(first['input'])}."


_BY_NAME = {"missing": "is missing: give it", "extra_forbidden": "is not a known field: leave it out"}


def _allowed(message: str) -> str:
    """Return pydantic's rule for a value, to follow "must"."""
    allowed = message.split(" should ")[-1].partition(", unable")[0]
    return allowed.replace("be a valid tuple", "be a list")


def _depth(loc: tuple[int | str, ...]) -> int:
    """Return the length of the location to show: the field and an index in it, without union members."""
    return 2 if len(loc) > 1 and isinstance(loc[1], int) else 1


def refuse_unknown(what: str, given: Any, known: Collection[str]) -> None:
    """Check the names of a mapping, such as a pydantic model's input. Anything but a dict is ignored.

    Raises:
        InvalidValueError: A name is unknown; the message suggests the nearest, or lists all.
    """
    for name in given if isinstance(given, dict) else ():
        if name not in known:
            near = nearest(name, known)
            hint = f"Did you mean {near!r}?" if near else f"Available: {', '.join(known)}."
            raise InvalidValueError(f"Unknown {what} {short_repr(name)}. {hint}")


def nearest(name: Any, known: Collection[str]) -> str | None:
    """Return the known name most similar to `name`, or None."""
    near = difflib.get_close_matches(name.lower(), known, n=1) if isinstance(name, str) else []
    return near[0] if near else None


def checked_names(what: str, given: Mapping[Any, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a mapping as keyword arguments.

    Raises:
        InvalidValueError: A name is unknown; see `refuse_unknown`.
    """
    names = dict(given)
    refuse_unknown(what, names, known)
    return names


def utf8_or_none(value: object) -> str | None:
    """Return a string that can be encoded as UTF-8; None for anything else, which a file could not store."""
    if type(value) is str and value.isascii():  # the usual case
        return value
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return str.__str__(value)


def is_text(value: object) -> bool:
    """Return whether a value is a string that can be encoded as UTF-8."""
    return utf8_or_none(value) is not None


INT32_MAX = 2**31 - 1
"""The highest token id."""
_LOGITS = "Positive values are logits: start the server with --logprobs-mode raw_logprobs or processed_logprobs."


def integer(value: object) -> int | None:
    """Return an integer, Python's or NumPy's; None for anything else, a bool included."""
    if type(value) is int:
        return value
    return operator.index(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None


def integers(value: object) -> list[int] | None:
    """Return a list, tuple or array of integers, shape (n,); None for anything else."""
    return _numbers(value, "iu", list[int])


def floats(value: object) -> list[float | None] | None:
    """Return a list, tuple or array of numbers or None, shape (n,); None for anything else."""
    return _numbers(value, "fiu", list[float | None])


def _numbers(value: object, kinds: str, kind: type[T]) -> T | None:
    """Return a sequence, or an array of NumPy `kinds`, as a new list of type `kind`; None for anything else."""
    if type(value) is not list:
        value = _listed(value, kinds)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        if not isinstance(value, list):
            return None
    try:
        return msgspec.convert([one.item() if isinstance(one, np.generic) else one for one in value], kind)
    except msgspec.ValidationError:
        return None


def _listed(value: object, kinds: str) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 and value.dtype.kind in kinds else None
    text = isinstance(value, str | bytes | bytearray | memoryview)
    return list(value) if isinstance(value, Sequence) and not text else None  # msgspec takes a set, too


class RawReader(msgspec.Struct, frozen=True):
    """Reads one answer's values; raises `ProtocolViolationError` with backend and request id.

    Attributes:
        backend: The backend's name.
        request_id: Our request id.
    """

    backend: str
    request_id: str

    def unreadable(self, raw: object, error: Exception) -> BackendError:
        """Return an exception that the answer's own objects raised as a `ProtocolViolationError`; our own unchanged."""
        if isinstance(error, BackendError):
            return error
        refused = self.violation(
            f"Law 4: the {type(raw).__name__} of the backend {self.backend!r} cannot be read: "
            f"{type(error).__name__}: {short_repr(error)}. The answer was discarded."
        )
        refused.__cause__ = error
        return refused

    def violation(self, sentence: str) -> ProtocolViolationError:
        """Return the error for a broken law."""
        return ProtocolViolationError(sentence, backend=self.backend, request_id=self.request_id)

    def integers(self, name: str, value: object) -> list[int]:
        """Return a reported list of integers."""
        found = integers(value)
        if found is None:
            raise self.violation(f"Law 2: {name} must be a list of integers, not {short_repr(value)}.")
        return found

    def floats(self, name: str, value: object) -> list[float | None]:
        """Return a reported list of numbers, with None for missing ones."""
        found = floats(value)
        if found is None:
            raise self.violation(f"Law 4: {name} must be a list of numbers, not {short_repr(value)}.")
        return found

    def token_ids(self, ids: Sequence[int], what: str = "output id") -> TokenIds:
        """Return ids as int32, shape (n,); refuse ids outside 0..2**31 - 1."""
        try:  # `struct` refuses what int32 cannot hold, in half of the time that an array takes
            packed = struct.pack(f"<{len(ids)}i", *ids)
        except struct.error:
            packed = None
        if packed is None or not packed[3::4].isascii():  # the highest byte of a negative id is above 127
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise self.violation(f"Law 2: {what} {wrong} is not a token id.")
        return np.frombuffer(packed, np.int32)

    def text(self, name: str, value: object) -> str | None:
        """Return a reported string, or None."""
        if value is None or (type(value) is str and value.isascii()):  # the usual cases
            return value
        if (found := utf8_or_none(value)) is not None:
            return found
        raise self.violation(f"Law 4: {name} must be a string or None, not {short_repr(value)}.")

    def same_request(self, sent: str, named: object) -> None:
        """Compare the id by which an answer names its request with the id that was sent.

        A server may put a prefix of its own before it. A suffix makes it another id: that of a retry or a resumed part.
        """
        found = self.text("response_id", named)
        if found is None:
            raise self.violation(
                "Law 4: the answer does not name its request (response_id), so it may be another request's answer. Its "
                f"server is not {self.backend} but another one with the same API, or a proxy removed the field."
            )
        before = found[: len(found) - len(sent)]
        if not found.endswith(sent) or before[-1:].isalnum():
            error = self.violation(
                f"Law 4: this is the answer to another request: {sent!r} was sent, and the answer names "
                f"{short_repr(found)}. It was discarded. Check the proxies in front of the server: they must not cache "
                "answers, and must pass the header X-Request-Id on unchanged (Envoy: preserve_external_request_id)."
            )
            error.sent = True
            raise error

    def same_ids(self, sentence: str, expected: list[int], found: Sequence[object]) -> None:
        """Compare two lists of ids of one length; the error formats `sentence` with id, offset and other id."""
        if expected == found:  # fast path
            return
        for offset, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one != other:
                raise self.violation(f"Law 4: {sentence.format(one, offset, other)}.")

    def logprobs(self, values: Sequence[float | None], ids: Sequence[int] = ()) -> Logprobs:
        """Return logprobs as float32, shape (n,). `ids` are the output ids, which an error names."""
        try:
            logprobs = np.frombuffer(struct.pack(f"<{len(values)}f", *values), np.float32)
        except (struct.error, OverflowError):  # None becomes NaN and overflow infinite, and both are refused
            with np.errstate(over="ignore"):
                logprobs = np.array(values, np.float32)
        try:
            check_logprobs(logprobs)
        except LawViolationError as error:
            if None in values:
                offset = list(values).index(None)
                token = f" (id {ids[offset]})" if ids else ""
                raise self.violation(f"Law 4: output token {offset}{token} has no logprob.") from None
            raise self.violation(f"{error} {_LOGITS}" if ROUNDING < logprobs.max() < np.inf else str(error)) from error
        return logprobs
