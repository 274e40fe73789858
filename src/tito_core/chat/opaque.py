"""Content that a template may place but not read, so that what it makes of it holds for other content too.

A template is a program, and usually one that asks little of content: it writes it out, strips it, looks how it
begins. `Opaque` stands for content in a rendering that is watched. It is no `str`, and refuses all but what is followed
and in `watching`, so that whatever a template learns of content is on record. What is refused makes the rendering
worthless, even where somebody swallows the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

NOT_KNOWN = -1
"""Number of a leaf whose text is not known, such as the JSON of a call's arguments. It is content from end to end, and
not empty."""


class NotFollowedError(Exception):
    """A template did with content what is not followed."""


class Leaf(NamedTuple):
    """One piece of content as it is placed: the `number`-th, after some functions, each with more arguments."""

    number: int
    steps: tuple[tuple[Callable[..., str], tuple[str, ...]], ...] = ()

    @property
    def is_known(self) -> bool:
        """Tell whether its text follows from the content."""
        return self.number >= 0

    def of(self, values: Sequence[str]) -> str:
        """Give its text."""
        value = values[self.number]
        for function, given in self.steps:
            value = function(value, *given)
        return value


class Guard(NamedTuple):
    """What a template learnt of content: that a method of `str`, given a string or other content, gives this."""

    leaf: Leaf
    method: Callable[[str, str], bool]
    given: str | Leaf
    outcome: bool = True

    def learnt(self, values: Sequence[str]) -> bool:
        """Tell what it would learn of other content."""
        return self.method(self.leaf.of(values), self.given.of(values) if isinstance(self.given, Leaf) else self.given)


@dataclass(slots=True)
class Watch:
    """One rendering that is watched.

    Attributes:
        values: The content that its guards are taken from, each piece not empty.
        guards: What the template learnt.
        refused: Whether it did what is not followed.
    """

    values: Sequence[str]
    guards: list[Guard] = field(default_factory=list)
    refused: bool = False

    def content(self, number: int) -> Opaque:
        """Stand for the `number`-th piece of content."""
        return Opaque(self, (Leaf(number),))

    def arguments(self) -> Opaque:
        """Stand for a call's arguments, of which a template may learn nothing but that there are any."""
        return Opaque(self, (Leaf(NOT_KNOWN),), {})

    def refuse(self, what: str) -> NoReturn:
        """Give up."""
        self.refused = True
        raise NotFollowedError(f"A template used {what} on content, which is not followed.")

    def learn(self, leaf: Leaf, method: Callable[[str, str], bool], given: str | Leaf) -> bool:
        """Tell a template what it asks, and keep it as a guard."""
        outcome = Guard(leaf, method, given).learnt(self.values)
        self.guards.append(Guard(leaf, method, given, outcome))
        return outcome


class Opaque:
    """Content, or text with content in it, or the arguments of a call; never empty.

    Args:
        watch: The rendering that it is part of.
        parts: What it consists of as text, in order.
        value: Something of its type.
    """

    __slots__ = ("_value", "_watch", "parts")

    def __init__(self, watch: Watch, parts: tuple[str | Leaf, ...], value: str | Mapping[str, Any] = "") -> None:
        self._watch, self.parts, self._value = watch, parts, value

    @property
    def is_text(self) -> bool:
        """Tell whether it stands for a string."""
        return isinstance(self._value, str)

    def refuse(self, what: str) -> NoReturn:
        """Give up; see `Watch.refuse`."""
        self._watch.refuse(what)

    def is_a(self, test: Callable[[Any], bool]) -> bool:
        """Answer a test of its type."""
        return test(self._value)

    def written(self) -> Opaque:
        """Give it as text; of arguments that is Python's notation, which is not known."""
        return self if self.is_text else Opaque(self._watch, self.parts)

    def made(self, function: Callable[..., str], *given: str) -> Opaque:
        """Give what a function of it makes; one that leaves nothing of it is not followed."""
        leaf = self._leaf(function)
        made = Leaf(leaf.number, (*leaf.steps, (function, given)))
        if not self._watch.learn(made, str.__ne__, ""):
            self.refuse(f"{function}, which left nothing of it")
        return Opaque(self._watch, (made,))

    def as_json(self, function: Callable[[str], str]) -> Opaque:
        """Give its JSON, which of anything but one piece of content is not known."""
        if self.is_text and len(self.parts) == 1 and isinstance(self.parts[0], Leaf) and self.parts[0].is_known:
            return self.made(function)
        return Opaque(self._watch, (Leaf(NOT_KNOWN),))

    def strip(self, chars: str | None = None) -> Opaque:
        """Strip both ends; see `str.strip`."""
        return self._stripped(str.strip, chars)

    def lstrip(self, chars: str | None = None) -> Opaque:
        """Strip the left end."""
        return self._stripped(str.lstrip, chars)

    def rstrip(self, chars: str | None = None) -> Opaque:
        """Strip the right end."""
        return self._stripped(str.rstrip, chars)

    def startswith(self, prefix: str) -> bool:
        """Tell how it begins."""
        return self._learn(str.startswith, prefix)

    def endswith(self, suffix: str) -> bool:
        """Tell how it ends."""
        return self._learn(str.endswith, suffix)

    def _stripped(self, function: Callable[..., str], chars: str | None) -> Opaque:
        if chars is None:
            return self.made(function)
        return self.made(function, chars) if type(chars) is str else self.refuse(f"{function} with content")

    def _learn(self, method: Callable[[str, str], bool], other: Any) -> bool:
        leaf = self._leaf(method)
        given = other._leaf(method) if type(other) is Opaque else other
        if type(given) not in (str, Leaf):
            self.refuse(f"{method} with a {type(other).__name__}")
        return self._watch.learn(leaf, method, given)

    def _leaf(self, what: object) -> Leaf:
        """Give the one piece that it is, of which functions can be followed."""
        first = self.parts[0]
        if self.is_text and len(self.parts) == 1 and isinstance(first, Leaf) and first.is_known:
            return first
        self.refuse(str(what))

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: Any) -> Opaque:
        return joined(self, (self, other))

    def __radd__(self, other: Any) -> Opaque:
        return joined(self, (other, self))

    def __contains__(self, other: Any) -> bool:
        return self._learn(str.__contains__, other)

    def __eq__(self, other: object) -> bool:
        return other is not None and self._learn(str.__eq__, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getattr__(self, name: str) -> Any:
        self.refuse(name)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Opaque, *args: Any) -> Any:
        self.refuse(name)

    return refuse


# What Python would do in a way of its own, or Jinja try and do without.
for _name in ("hash", "str", "repr", "format", "len", "iter", "getitem", "call", "mod", "rmod", "mul", "rmul", "html"):
    setattr(Opaque, f"__{_name}__", _refusing(_name))
for _name in ("lt", "le", "gt", "ge", "int", "float", "index", "bytes", "reversed", "reduce_ex"):
    setattr(Opaque, f"__{_name}__", _refusing(_name))


def joined(one: Opaque, pieces: Iterable[Any]) -> Opaque:
    """Put texts together, this one among them."""
    parts: list[str | Leaf] = []
    for piece in pieces:
        if type(piece) is Opaque and piece.is_text:
            parts += piece.parts
        elif isinstance(piece, str):
            parts.append(piece)
        else:
            one.refuse(f"+ with a {type(piece).__name__}")
    return Opaque(one._watch, tuple(parts))
