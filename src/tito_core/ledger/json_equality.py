"""JSON-like values: compared as JSON does, where 1, 1.0 and true are three values, and copied as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class _Number:
    """A number that equals only its own type. Strict values are compared from the left: `strict(a) == b`."""

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

    Strings are kept by reference, so comparing one with itself costs a pointer comparison, whatever its length.
    Dict, list and string comparison stay the interpreter's own, which is what makes long histories cheap.
    """
    if isinstance(value, dict):  # most of what is in one are strings, and a call would be most of what they cost
        return {key: item if type(item) is str else strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [item if type(item) is str else strict(item) for item in value]
    if isinstance(value, tuple):  # which equals no list, so it stays one
        return tuple([strict(item) for item in value])
    if isinstance(value, float | int):
        return _Number(value)
    return value  # a string, bytes, None, or already strict


DEPTH = 100
"""How deep dicts and lists may be nested in what a ledger keeps: more could be written, and not read back."""


def plain(value: Any, where: str) -> Any:
    """Copy a value as JSON. NaN and infinities are kept; NumPy's scalars become Python's.

    Args:
        value: Dicts with string keys, lists, tuples (which become lists), strings, numbers, bools and None.
        where: What the value is, for the message.

    Raises:
        TypeError: Something else is in it.
        ValueError: A string is not Unicode, a whole number needs more than 64 bits, or it is nested too deeply.
    """
    return _copied(value, where, (), DEPTH)


_Place = tuple[Any, ...]
"""Where a value is: the place of what holds it, and its key; () for the whole. A name is made for errors only."""


def _copied(value: Any, where: str, place: _Place, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        value.encode()  # a lone surrogate has no place in a file
        return str.__str__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{_named(where, place)} has the keys {list(value)}; in JSON a key is a string.")
        _expect_depth(where, depth)
        return {
            _copied(key, where, place, depth): _copied(item, where, (place, key), depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        _expect_depth(where, depth)
        return [_copied(item, where, (place, index), depth - 1) for index, item in enumerate(value)]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{_named(where, place)} is {_shown(value)}, which needs more than 64 bits.")
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{_named(where, place)} is {value!r}, which is not JSON.")


def _expect_depth(where: str, depth: int) -> None:
    if not depth:
        raise ValueError(f"{where} is nested more than {DEPTH} levels deep; flatten it, or keep it as a string.")


def _named(where: str, place: _Place) -> str:
    keys = []
    while place:
        place, key = place
        keys.append(f"[{key!r}]")
    return where + "".join(reversed(keys))


def _shown(number: int) -> str:
    """Write out a number that may have more digits than Python writes."""
    return str(number) if number.bit_length() <= 256 else f"a number of {number.bit_length()} bits"
