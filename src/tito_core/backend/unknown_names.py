"""A name that nobody knows is refused where the user wrote it, with the nearest one that somebody does."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from tito_core.backend.typed_values import InvalidValueError, shown


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
