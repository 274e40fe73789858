"""`'...' % values` and `'...'.format(values)` with traces.

The format string's own characters stay scaffold, and each value that is put in whole keeps its spans. What comes out
is compared with Python's own result: where it differs (padding, conversions), all of the result counts as content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from tito_core.chat.traced import Traced, as_text, concat, mark

_PERCENT = re.compile(r"%(?:\((?P<key>[^()]*)\))?(?P<kind>.)", re.DOTALL)


def percent(layout: str, values: Any) -> str:
    """Do `layout % values`."""
    plain = str.__mod__(str.__str__(layout), values)
    return _checked(plain, _percent(layout, values), layout, values)


def braces(layout: str, plain: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Give `plain`, which is `layout.format(*args, **kwargs)` as the sandbox made it, with its traces."""
    return _checked(plain, _braces(layout, args, kwargs), layout, args, kwargs)


def _checked(plain: str, followed: str | None, *origins: object) -> str:
    return mark(plain, *origins) if followed is None or str.__ne__(followed, plain) else followed


def _percent(layout: str, values: Any) -> str | None:
    in_order = iter(values if isinstance(values, tuple) else (values,))
    pieces, at = [], 0
    for directive in _PERCENT.finditer(layout):
        pieces.append(layout[at : directive.start()])
        at = directive.end()
        if directive["kind"] == "%":
            pieces.append("%")
        elif directive["kind"] != "s":
            return None
        else:
            pieces.append(as_text(next(in_order) if directive["key"] is None else values[directive["key"]]))
    return concat((*pieces, layout[at:]))


def _braces(layout: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    if isinstance(layout, Traced) and layout.spans:
        return None  # the parser of formats cuts plain strings
    pieces: list[str] = []
    unnamed = iter(args)
    for literal, field, layout_of_field, conversion in Formatter().parse(str.__str__(layout)):
        pieces.append(literal)
        if field is None:
            continue
        if layout_of_field or conversion or not (field == "" or field.isidentifier()):
            return None
        pieces.append(as_text(next(unnamed) if field == "" else kwargs[field]))
    return concat(pieces)
