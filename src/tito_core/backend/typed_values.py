"""Names and values that users type: what is wrong is one sentence, for an unknown name with the nearest known."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class InvalidValueError(ValueError):
    """A value that a user typed is not allowed; the sentence names the field, the value and what is allowed."""


def shown(value: object) -> str:
    """Return a wrong value as an error shows it, shortened; of one that cannot be written down, only its type."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, an integer of thousands of digits, a `__repr__` that raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def positive_seconds(name: str, given: Any, allowed: str = "a positive number of seconds") -> float:
    """Return a time that a user gave, in seconds.

    Raises:
        InvalidValueError: It is not a positive number, or too large for a clock.
    """
    try:
        seconds = float(given) if isinstance(given, int | float) and not isinstance(given, bool) else math.nan
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidValueError(f"{name} must be {allowed}, not {shown(given)}.")
    return seconds


def at_least(name: str, given: Any, least: int, allowed: str = "") -> int:
    """Return a whole number that a user gave.

    Raises:
        InvalidValueError: It is not a whole number, or less than `least`.
    """
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        allowed = allowed or f"a whole number, at least {least}"
        raise InvalidValueError(f"{name} must be {allowed}, not {shown(given)}.")
    return given


class TypedValues(BaseModel):
    """Base of models that users write as arguments or dicts.

    Raises:
        InvalidValueError: A name is unknown, or a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # type checkers read the fields as arguments

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise InvalidValueError(sentence(error)) from None

        __init__.__pydantic_base_init__ = True  # `model_validate` need not call it


def sentence(error: ValidationError) -> str:
    """Return the first problem of pydantic's report as one sentence."""
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] in _BY_NAME:
        return f"{'.'.join(map(str, first['loc']))} {_BY_NAME[first['type']]}."
    same = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]  # a union has one for each kind
    allowed = " or ".join(dict.fromkeys(_allowed(problem["msg"]) for problem in same))
    where = "".join(f"[{part}]" if isinstance(part, int) else part for part in first["loc"][: _depth(first["loc"])])
    return f"{where} must {allowed}, not {shown(first['input'])}."


_BY_NAME = {"missing": "is missing: give it", "extra_forbidden": "is not a known field: leave it out"}


def _allowed(message: str) -> str:
    """Return what pydantic says of a value, as the rest of a sentence."""
    allowed = message.split(" should ")[-1].partition(", unable")[0]
    return allowed.replace("be a valid tuple", "be a list")


def _depth(loc: tuple[int | str, ...]) -> int:
    """Return how much of a place users know: the field and an index in it, not the kinds of a union."""
    return 2 if len(loc) > 1 and isinstance(loc[1], int) else 1


def refuse_unknown(what: str, given: Any, known: Collection[str]) -> None:
    """Look at the names of a mapping, such as a pydantic model's input.

    Raises:
        InvalidValueError: One is not known; the sentence suggests the nearest, or lists them all.
    """
    for name in given if isinstance(given, dict) else ():
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else f". Known: {', '.join(known)}."
            raise InvalidValueError(f"There is no {what} {shown(name)}{hint}")


def nearest(name: Any, known: Collection[str]) -> str | None:
    """Return the known name that is nearest to a name, or None."""
    near = difflib.get_close_matches(name.lower(), known, n=1) if isinstance(name, str) else []
    return near[0] if near else None


def checked_names(what: str, given: Mapping[Any, Any], known: Collection[str]) -> dict[str, Any]:
    """Return a mapping as arguments.

    Raises:
        InvalidValueError: A name is not known; see `refuse_unknown`.
    """
    names = dict(given)
    refuse_unknown(what, names, known)
    return names


def text(value: object) -> str | None:
    """Return a string that UTF-8 can write; None for anything else, as a file could not keep it."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return str.__str__(value)


def is_text(value: object) -> bool:
    """Return whether a value is a string that UTF-8 can write."""
    return text(value) is not None
