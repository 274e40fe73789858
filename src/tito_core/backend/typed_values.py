"""Values that users type: what is wrong with them is one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class InvalidValueError(ValueError):
    """A value that a user typed is not allowed; the sentence names the field, the value and what is allowed."""


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
    shown = repr(first["input"])
    return f"{where} must {allowed}, not {shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]}...'}."


_BY_NAME = {"missing": "is missing: give it", "extra_forbidden": "is not a known field: leave it out"}


def _allowed(message: str) -> str:
    """Return what pydantic says of a value, as the rest of a sentence."""
    allowed = message.split(" should ")[-1].partition(", unable")[0]
    return allowed.replace("be a valid tuple", "be a list")


def _depth(loc: tuple[int | str, ...]) -> int:
    """Return how much of a place users know: the field and an index in it, not the kinds of a union."""
    return 2 if len(loc) > 1 and isinstance(loc[1], int) else 1
