"""Lists and numbers of a backend's answer, which may be of any type, read as Python's own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np


def integer(value: object) -> int | None:
    """Return an integer, Python's or NumPy's; None for anything else, a bool included."""
    if type(value) is int:
        return value
    return operator.index(value) if _is_integer(value) and isinstance(value, SupportsIndex) else None


def integers(value: object) -> list[int] | None:
    """Return a list, tuple or array of integers, shape (n,); None for anything else."""
    found = _items(value, "iu")
    if found is None or set(map(type, found)) <= {int}:
        return found
    return [int(one) for one in found] if all(map(_is_integer, found)) else None


def floats(value: object) -> list[float | None] | None:
    """Return a list, tuple or array of numbers or None, shape (n,); None for anything else."""
    found = _items(value, "fiu")
    if found is None or set(map(type, found)) <= {float, int, type(None)}:
        return found
    known = all(one is None or isinstance(one, float | np.floating) or _is_integer(one) for one in found)
    return [None if one is None else float(one) for one in found] if known else None


def text(value: object) -> str | None:
    """Return a string that UTF-8 can write; None for anything else, as a file could not keep it."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return str.__str__(value)


def _items(value: object, kinds: str) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 and value.dtype.kind in kinds else None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return None
    return list(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
