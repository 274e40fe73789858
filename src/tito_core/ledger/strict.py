"""Comparing JSON-like values as JSON does: 1, 1.0 and true are three values."""

from __future__ import annotations

from typing import Any


class _Number:
    """A number that equals only its own type. Strict values are compared from the left: `strict(a) == b`."""

    __slots__ = ("kind", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: float) -> None:
        self.value = value
        self.kind = type(value)

    def __eq__(self, other: object) -> bool:
        if self.value is other or type(other) is self.kind:
            return self.value is other or self.value == other
        return type(other) is _Number and self.kind is other.kind and self.value == other.value


def strict(value: Any) -> Any:
    """Copy a value's containers so that `strict(a) == b`, with b strict or not, holds only for the same JSON.

    Strings are kept by reference, so comparing one with itself costs a pointer comparison, whatever its length.
    Dict, list and string comparison stay the interpreter's own, which is what makes long histories cheap.
    """
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float | int):
        return _Number(value)
    return value  # a string, bytes, None, or already strict
