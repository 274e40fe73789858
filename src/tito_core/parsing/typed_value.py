"""The readings of a value that a format writes as plain text (Qwen3-Coder, GLM, MiniMax); the tool's schema decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tito_core.parsing.call_text import Malformed
from tito_core.parsing.json_call import json_value
from tito_core.parsing.python_literals import literal
from tito_core.parsing.schema import Choice

_PYTHON = {"True": True, "False": False, "None": None}
"""As Jinja writes them: the templates of Qwen3-Coder and Nemotron render scalars this way."""


def reading(text: str, in_python: Callable[[], bool] = lambda: False) -> Choice:
    """Return what a value may be: JSON, or `True`, `False` or `None`; else the text itself, including blanks.

    Text between double quotes is text: strings are written without quotes, so these quotes belong to the value.

    Args:
        text: The value as written.
        in_python: Whether the family's template writes lists and objects as Python does; called only for text that may
            be one and is not JSON.
    """
    try:
        value = _decoded(text, in_python)
    except Malformed as fault:
        return Choice((text,), fault.reason[:1].lower() + fault.reason[1:].rstrip("."))
    return Choice((text,)) if isinstance(value, str) else Choice((value, text))


def _decoded(text: str, in_python: Callable[[], bool]) -> Any:
    if (word := text.strip()) in _PYTHON:
        return _PYTHON[word]
    try:
        return json_value(text, "value")
    except Malformed:
        if word[:1] not in ("[", "{") or not in_python():
            raise
        try:
            return literal(text)
        except Malformed:
            pass
        raise


def element(text: str) -> Choice:
    """Return what an element without inner ones may be (MiniMax M3); a blank one is also an empty list or object."""
    found = reading(text)
    return found if text.strip() else Choice((*found.options, [], {}), found.why)


def nested(members: list[tuple[str, Any]], item: str) -> Choice:
    """Return what an element with inner ones may be: a list if all have the name `item`; an object if no name repeats.

    Raises:
        Malformed: It can be neither.
    """
    return Choice(tuple(_containers(members, item)))


def _containers(members: list[tuple[str, Any]], item: str) -> Iterator[Any]:
    names = [name for name, _ in members]
    listed = set(names) == {item}
    if listed:
        yield [value for _, value in members]
    if len(set(names)) == len(names):
        yield dict(members)
    elif not listed:
        [(repeated, _)] = Counter(names).most_common(1)
        raise Malformed(f"The element {repeated!r} appears twice.")
