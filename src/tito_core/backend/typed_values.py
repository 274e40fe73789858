"""Check names and values that users type; an error is one sentence and suggests the nearest known name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class InvalidValueError(ValueError):
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
