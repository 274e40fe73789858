"""Jinja's filters with traces: followed where templates use them on content, otherwise all of a result is content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from jinja2 import Environment, pass_environment
from jinja2.filters import FILTERS, make_attrgetter

from tito_core.chat.formatting import percent
from tito_core.chat.traced import Traced, as_text, conservative, join, mark

_TAKING = {"attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list", "map"}
_CHOOSING = {"max", "min", "random", "reject", "rejectattr", "select", "selectattr", "slice", "sort", "unique"}
SELECTING = _TAKING | _CHOOSING
"""Filters that hand on what they were given, and make no string of their own."""


def traced_filters() -> dict[str, Callable[..., Any]]:
    """Give every filter of Jinja's, and transformers' `tojson`, under its name."""
    return {name: function if name in SELECTING else _marking(function) for name, function in FILTERS.items()} | {
        "format": _format,
        "join": _join,
        "lower": lambda s: _traced(s).lower(),
        "replace": _replace,
        "safe": as_text,  # nothing is escaped in a chat template
        "string": as_text,
        "tojson": _tojson,
        "trim": lambda value, chars=None: _traced(value).strip(chars),
        "upper": lambda s: _traced(s).upper(),
    }


def _marking(function: Callable[..., Any]) -> Callable[..., Any]:
    return conservative(function, skip=1 if hasattr(function, "jinja_pass_arg") else 0)


def _traced(value: Any) -> Traced:
    """Give a value as text whose methods keep the traces of their arguments too."""
    text = as_text(value)
    return text if isinstance(text, Traced) else Traced.of(text, ())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # transformers replaces Jinja's tojson, which escapes HTML, by json.dumps with these defaults.
    # All of it is content when any string in it is: the brackets stand for the content's own shape.
    apart = None if separators is None else tuple(separators)
    return mark(_encoder(ensure_ascii, indent, apart, sort_keys).encode(value), value)


@lru_cache(maxsize=64, typed=True)  # an indent of 2.0 is an error, also after one of 2
def _encoder(ensure_ascii: bool, indent: int | None, separators: Any, sort_keys: bool) -> json.JSONEncoder:
    """Make what `json.dumps` makes anew at each call."""
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = map(make_attrgetter(environment, attribute), value) if attribute is not None else value
    return join(as_text(d), map(as_text, items))


def _replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    return _traced(s).replace(as_text(old), as_text(new), -1 if count is None else count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("The format filter takes positional or keyword arguments, not both.")
    return percent(as_text(value), kwargs or args)
