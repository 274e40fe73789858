"""Strings whose characters say themselves where they came from: each source has an alphabet of its own."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tito_core.chat.traced import Traced, concat

FIRST, SECOND, SCAFFOLD = "абВ\u2003\u2028", "λμΛ", "xyZ \n:"
SOURCE_OF = dict.fromkeys(FIRST + FIRST.swapcase(), 1) | dict.fromkeys(SECOND + SECOND.swapcase(), 2)

pieces = st.one_of(
    st.text(FIRST, max_size=4).map(lambda text: Traced.content(text, 1)),
    st.text(SECOND, max_size=4).map(lambda text: Traced.content(text, 2)),
    st.text(SCAFFOLD, max_size=4),
)
strings = st.lists(pieces, max_size=4).map(concat)
traced = strings.map(lambda s: s if isinstance(s, Traced) else Traced.of(s, ()))


def origins(value: str) -> list[int | None]:
    """Source of each character."""
    found: list[int | None] = [None] * len(value)
    for start, stop, source in getattr(value, "spans", ()):
        assert 0 <= start < stop <= len(value)
        for i in range(start, stop):
            assert found[i] is None, "spans overlap"
            found[i] = source
    return found


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def check_exact(value: Any) -> None:
    if isinstance(value, str):
        assert origins(value) == [SOURCE_OF.get(character) for character in plain(value)]
    elif isinstance(value, list | tuple):
        for item in value:
            check_exact(item)


def check_nothing_lost(value: Any) -> None:
    if isinstance(value, str):
        assert all(o is not None for o, c in zip(origins(value), plain(value), strict=True) if c in SOURCE_OF)
    elif isinstance(value, list | tuple):
        for item in value:
            check_nothing_lost(item)
