"""Strings that remember which of their characters are message content.

A chat template is Jinja code that strips, slices, joins and compares message content. `Traced` is a `str` with the same
value, so a template behaves as with plain strings, and every operation keeps track of the message that each
character came from. The rendered prompt is the template's own, character for character, and content is distinguished
from scaffold.

Operations that are not tracked precisely mark their whole result as content. That is safe, because content never
becomes a control token.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from typing import Any, SupportsIndex

from jinja2 import Undefined

Span = tuple[int, int, int]
"""Characters `start` to `stop` came from source `source` (a message's index, or a reserved number)."""


UNKNOWN = -1
"""Source of content characters from an unknown message."""


class Traced(str):
    """A string with content spans: sorted, disjoint, non-empty `(start, stop, source)`."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str = "", spans: Iterable[Span] | None = None) -> Traced:
        """Make a traced string; without spans, all of it counts as content."""
        traced = str.__new__(cls, text)
        traced.spans = tuple(spans) if spans is not None else ((0, len(text), UNKNOWN),) if text else ()
        return traced

    @classmethod
    def of(cls, text: str, spans: Iterable[Span]) -> Traced:
        """Make a traced string with the given spans."""
        traced = str.__new__(cls, text)
        traced.spans = tuple(spans)
        return traced

    @classmethod
    def content(cls, text: str, source: int) -> Traced:
        """Make a string that is content from end to end."""
        traced = str.__new__(cls, text)
        traced.spans = ((0, len(text), source),) if text else ()
        return traced

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if type(other) is str:  # the usual case: a literal of the template
            text = str.__add__(self, other)
            return Traced.of(text, self.spans) if self.spans else text
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        if type(other) is str:
            text, by = str.__add__(other, self), len(other)
            moved = [(start + by, stop + by, source) for start, stop, source in self.spans]
            return Traced.of(text, moved) if moved else text
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            index = operator.index(key)
            index += len(self) if index < 0 else 0
            return self._cut(index, index + 1) if 0 <= index < len(self) else str.__getitem__(self, key)
        start, stop, step = key.indices(len(self))
        if step != 1:
            return mark(str.__getitem__(self, key), self)
        return self._cut(start, max(start, stop))

    def __iter__(self) -> Iterator[str]:
        return (self._cut(i, i + 1) for i in range(len(self)))

    def _cut(self, start: int, stop: int) -> Traced:
        inside = ((max(a, start) - start, min(b, stop) - start, source) for a, b, source in self.spans)
        return Traced.of(str.__getitem__(self, slice(start, stop)), (span for span in inside if span[0] < span[1]))

    def strip(self, chars: str | None = None, /) -> str:
        """Strip both ends; see `str.strip`."""
        start = len(self) - len(str.lstrip(self, chars))
        return self._cut(start, max(start, len(str.rstrip(self, chars))))

    def lstrip(self, chars: str | None = None, /) -> str:
        """Strip the left end."""
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        """Strip the right end."""
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        """Remove a prefix."""
        return self._cut(len(prefix), len(self)) if prefix and str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        """Remove a suffix."""
        return self._cut(0, len(self) - len(suffix)) if suffix and str.endswith(self, suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Split, each piece with its own spans."""
        return self._located(str.split(self, sep, maxsplit), 0 if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Split from the right, each piece with its own spans."""
        end = len(self)
        located: list[str] = []
        for piece in reversed(str.rsplit(self, sep, maxsplit)):
            start = str.rfind(self, piece, 0, end)
            located.append(self._cut(start, start + len(piece)))
            end = start - (0 if sep is None else len(sep))
        return located[::-1]

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Split into lines, each with its own spans."""
        return self._located(str.splitlines(self, keepends), 0)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Split around the first separator."""
        head, middle, _ = str.partition(self, sep)
        a, b = len(head), len(head) + len(middle)
        return self._cut(0, a), self._cut(a, b), self._cut(b, len(self))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Split around the last separator."""
        _, middle, tail = str.rpartition(self, sep)
        b = len(self) - len(tail)
        a = b - len(middle)
        return self._cut(0, a), self._cut(a, b), self._cut(b, len(self))

    def _located(self, pieces: list[str], separator: int) -> list[str]:
        """Locate each piece in this string, left to right, and cut it out with its spans."""
        at = 0
        located: list[str] = []
        for piece in pieces:
            at = str.find(self, piece, at)
            located.append(self._cut(at, at + len(piece)))
            at += len(piece) + separator
        return located

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """Replace, keeping the spans of this string and of `new`."""
        if not old:
            return mark(str.replace(self, old, new, count), self, new)
        parts: list[str] = []
        at, remaining = 0, count.__index__()
        while remaining != 0 and (found := str.find(self, old, at)) >= 0:
            parts += [self._cut(at, found), new]
            at, remaining = found + len(old), remaining - 1
        return concat((*parts, self._cut(at, len(self))))

    def lower(self) -> str:
        """Lower the case."""
        return self._same_length(str.lower(self))

    def upper(self) -> str:
        """Raise the case."""
        return self._same_length(str.upper(self))

    def _same_length(self, text: str) -> str:
        return Traced.of(text, self.spans) if len(text) == len(self) else mark(text, self)

    def join(self, items: Iterable[str], /) -> str:
        """Join, keeping the spans."""
        return join(self, items)


def concat(pieces: Iterable[str]) -> str:
    """Concatenate pieces with their spans; a plain `str` if none has content."""
    items = list(pieces)
    if len(items) == 1 and (type(items[0]) is str or (type(items[0]) is Traced and items[0].spans)):
        return items[0]
    at = 0
    spans: list[Span] = []
    for item in items:
        if type(item) is not str and isinstance(item, Traced):
            for start, stop, source in item.spans:
                spans.append((start + at, stop + at, source))
        at += len(item)
    text = "".join(items)
    return Traced.of(text, spans) if spans else text


def join(separator: str, items: Iterable[str]) -> str:
    """Return `separator.join(items)` with the spans."""
    pieces: list[str] = []
    for i, item in enumerate(items):
        pieces += [separator, item] if i else [item]
    return concat(pieces)


def sources(value: object) -> list[int]:
    """Return the content sources in a string, or anywhere inside a list, tuple, set, mapping or view of one.

    Any other object (bytes, a namespace, ...) may hold content, so it yields `UNKNOWN`.
    """
    match value:
        case Traced():
            return [source for _, _, source in value.spans]
        case str() | int() | float() | Undefined() | None:
            return []
        case dict() | Mapping():
            return [source for pair in value.items() for item in pair for source in sources(item)]
        case list() | tuple() | Set() | ValuesView():
            return [source for item in value for source in sources(item)]
    return [UNKNOWN]


def mark(text: str, *origins: object) -> str:
    """Return the text, all marked as content if any of `origins` holds content."""
    found = sources(origins)
    return Traced.content(text, max(found)) if found else str.__str__(text)


def as_text(value: object) -> str:
    """Return `str(value)`; if `value` holds content, all of the result is content."""
    return value if isinstance(value, str) else mark(str(value), value)


def conservative(function: Callable[..., Any], skip: int = 0) -> Callable[..., Any]:
    """Wrap a Jinja filter or `str` method so that a string made from content is all content.

    This includes strings with some traced characters, since others may have lost their trace.

    Args:
        function: Returns a string, a list of strings, or another object.
        skip: Number of leading arguments that Jinja passes.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return mark_result(function(*args, **kwargs), (args[skip:], kwargs))

    return wrapped


def mark_result(result: Any, origins: tuple[Any, ...]) -> Any:
    """Mark every string of a result as content if any of `origins` holds content."""
    if isinstance(result, str):
        return mark(result, result, *origins)
    if isinstance(result, list):
        return [mark_result(item, origins) for item in result]
    return result


_REMAINING = (
    "capitalize",
    "casefold",
    "center",
    "expandtabs",
    "ljust",
    "rjust",
    "swapcase",
    "title",
    "translate",
    "zfill",
)
# All `str` methods that are not tracked precisely.
for _name in (*_REMAINING, "__format__", "__mod__", "__rmod__", "__mul__", "__rmul__"):
    setattr(Traced, _name, conservative(getattr(str, _name)))
