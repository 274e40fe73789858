"""JSON-like values: strict comparison, where 1, 1.0 and true are three values, and copies as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class _Number:
    """A number that equals only numbers of its own type. It must be the left operand: `strict(a) == b`."""

    __slots__ = ("kind", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.kind = type(value)

    def __eq__(self, other: object) -> bool:
        if self.value is other or type(other) is self.kind:
            return self.value is other or self.value == other
        return type(other) is _Number and self.kind is other.kind and self.value == other.value


def strict(value: Any) -> Any:
    """Copy a value's containers so that `strict(a) == b`, with b strict or not, holds only for the same JSON.

    Strings are kept by reference, so comparing a string with itself is a pointer comparison at any length. Dicts, lists
    and strings are compared by the interpreter itself, which makes long histories cheap.
    """
    if isinstance(value, dict):  # most items are strings; a call for each would dominate the cost
        return {key: item if type(item) is str else strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [item if type(item) is str else strict(item) for item in value]
    if isinstance(value, tuple):  # a tuple stays a tuple: it equals no list
        return tuple([strict(item) for item in value])
    if isinstance(value, float | int):
        return _Number(value)
    return value  # a string, bytes, None, or already strict


DEPTH = 100
"""Deepest nesting of dicts and lists in a ledger. Deeper values could be written to a file, but not read back."""


def plain(value: Any, name: str) -> Any:
    """Copy a value as JSON. NaN and infinities are kept; NumPy scalars become Python scalars.

    Args:
        value: Dicts with string keys, lists, tuples (which become lists), strings, numbers, bools and None.
        name: What the value is, for the error.

    Raises:
        TypeError: The value contains another type.
        ValueError: A string is not Unicode, a whole number needs more than 64 bits, or the nesting is too deep.
    """
    return _copy(value, name, (), DEPTH)


_Place = tuple[Any, ...]
"""Where a nested value is: the place of its container, and its key; () for the whole. Only errors write it out."""


def _copy(value: Any, name: str, place: _Place, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        value.encode()  # raises on a lone surrogate, which a file cannot hold
        return str.__str__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{_spelled(name, place)} has the keys {list(value)}, but JSON keys must be strings.")
        _expect_depth(name, depth)
        return {
            _copy(key, name, place, depth): _copy(item, name, (place, key), depth - 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        _expect_depth(name, depth)
        return [_copy(item, name, (place, index), depth - 1) for index, item in enumerate(value)]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{_spelled(name, place)} is {_digits(value)}, which needs more than 64 bits.")
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{_spelled(name, place)} is {value!r}, which is not JSON.")


def _expect_depth(name: str, depth: int) -> None:
    if not depth:
        raise ValueError(f"{name} is nested more than {DEPTH} levels deep; flatten it, or store it as a string.")


def _spelled(name: str, place: _Place) -> str:
    keys = []
    while place:
        place, key = place
        keys.append(f"[{key!r}]")
    return name + "".join(reversed(keys))


def _digits(number: int) -> str:
    """Format a number; Python refuses to format one of several thousand digits."""
    return str(number) if number.bit_length() <= 256 else f"a number of {number.bit_length()} bits"
