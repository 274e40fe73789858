"""What a template writes around new content, kept for each shape of messages and filled with other content.

A template writes the same around every tool result. So the first messages of a shape are rendered once more with a
`Placeholder` for each string of theirs. A template may write a placeholder, strip it or write it as JSON, and ask how
it begins or ends, what it holds and what it equals: these answers are kept as conditions. It may do nothing else with
one: a placeholder is no string, so whatever is not listed here raises, and that shape is always rendered.

Where the conditions hold for other content, the template runs the same way and writes the same pieces: text of its own,
and content that is never blank. Control tokens are spelled by its own text alone, so they come in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
from jinja2 import Undefined
from jinja2.runtime import Context, new_context
from strands.types.content import Messages

from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.messages import MessageFormat, TemplateMessage, template_messages, trace
from tito_core.chat.rendering import SELECTING, Rendering, TemplateError, TracingEnvironment, inputs
from tito_core.chat.traced import Traced, as_text, concat

if TYPE_CHECKING:
    from tito_core.chat.delta import Tail

MOST_SHAPES = 1 << 10
"""Shapes of which a layout is kept. Later ones are rendered."""
LONGEST_SHAPE = 1 << 14
"""Bytes of a shape that is kept: long ones, such as of a blank text of megabytes, are rendered."""
MOST_LAYOUTS = 4
"""Layouts of one shape, for contents that a template writes in different ways."""
_LONGEST_INT = 1 << 63
_TEXT, _INT, _FLOAT = 1, 2, 3
"""What stands for content in a shape; other values of a call's arguments stand for themselves."""


Shape = tuple[bytes, Sequence[str]]
"""Messages without their content: as JSON, with numbers in place of their strings; and these, none of them blank."""


def shape_of(messages: Messages, message_format: MessageFormat) -> Shape | None:
    """Return the shape of messages; None if they hold what is no JSON."""
    values = _Values()
    try:
        translated = template_messages(messages, message_format=message_format, leaves=values)
        return msgspec.json.encode(translated), values
    except (TypeError, UnicodeEncodeError, RecursionError):
        return None


class _Values(list[str]):
    """Collects the content of messages, and leaves numbers in its place."""

    def text(self, text: str, _: int) -> str | int:
        if not text or text.isspace():
            return text  # a template often asks whether there is any
        self.append(text)
        return _TEXT

    def name(self, name: str, _: int) -> str:
        return name

    def data(self, value: Any, source: int) -> Any:
        kind = type(value)
        if kind is str:
            return self.text(value, source)
        if kind is int and -_LONGEST_INT < value < _LONGEST_INT:  # Python refuses to write very long ones
            return _INT
        if kind is float:
            return _FLOAT
        if kind is dict and set(map(type, value)) <= {str}:
            return {key: self.data(item, source) for key, item in value.items()}
        if kind is list:
            return [self.data(item, source) for item in value]
        if kind is bool or value is None:
            return value
        raise TypeError(kind)


class Slot(NamedTuple):
    """A place in a rendering for content.

    Attributes:
        number: Which of a shape's values; -1 if its text is not known, as that of numbers.
        source: The trace source.
        steps: What the template does with it first.
    """

    number: int
    source: int
    steps: tuple[Callable[[str], str], ...] = ()

    def text(self, values: Sequence[str]) -> str:
        """Return its text."""
        text = values[self.number]
        for step in self.steps:
            text = step(text)
        return text


class Condition(NamedTuple):
    """What a template asked of content, with the answer."""

    slot: Slot
    method: Callable[[str, str], bool]
    given: str
    answer: bool


class Fixed(NamedTuple):
    """Packed ids, the provenance of each, and their text."""

    ids: bytes
    provenance: bytes
    text: str


Stretch = tuple[str | Slot, ...]
"""Text between two control tokens: the template's own, content that is the same for the shape (`Traced`), and slots."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a template writes after an answer, around the new content of one shape.

    Attributes:
        steps: Its text in order, from the end of the answer.
        conditions: What must hold for the content.
    """

    encoder: ContentSafeEncoder
    steps: tuple[Fixed | Stretch, ...]
    conditions: tuple[Condition, ...]

    def fill(self, values: Sequence[str]) -> EncodedText | None:
        """Return the tokens for a shape's values; None where the template would write something else around them."""
        for slot, method, given, answer in self.conditions:
            if method(slot.text(values), given) is not answer:
                return None
        filled = [step if isinstance(step, Fixed) else self._filled(step, values) for step in self.steps]
        ids, provenance, texts = zip(*filled, strict=True) if filled else ((), (), ())
        return EncodedText.joined(ids, provenance, "".join(texts))

    def _filled(self, stretch: Stretch, values: Sequence[str]) -> tuple[bytes, bytes, str]:
        whole, spans = "", list[tuple[int, int]]()
        for piece in stretch:
            start = len(whole)
            if type(piece) is Slot:
                whole += piece.text(values) if piece.steps else values[piece.number]
            else:
                whole += str.__str__(piece)
            if type(piece) is not str:
                spans += ((start, len(whole)),)
        return (*self.encoder.encode_stretch(whole, spans), whole)


class Layouts:
    """The layouts of one template. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[bytes, list[Layout | None]] = {}

    def fill(self, shape: Shape) -> EncodedText | None:
        """Return the tokens of messages, or None if they must be rendered."""
        key, values = shape
        for layout in self._known.get(key, ()):
            if layout is not None and (filled := layout.fill(values)) is not None:
                return filled
        return None

    def takes(self, shape: Shape) -> bool:
        """Return whether another layout of a shape would be kept."""
        if len(shape[0]) > LONGEST_SHAPE:
            return False
        known = self._known.get(shape[0])
        return len(self._known) < MOST_SHAPES if known is None else len(known) < MOST_LAYOUTS and None not in known

    def keep(self, shape: Shape, layout: Layout | None) -> None:
        """Keep a layout; with None, the shape is always rendered."""
        self._known.setdefault(shape[0], []).append(layout)


def learn_layout(
    rendering: Rendering,
    encoder: ContentSafeEncoder,
    values: Sequence[str],
    messages: tuple[Sequence[TemplateMessage], Messages, int],
    tools: Sequence[Mapping[str, Any]] | None,
    locate: Callable[[Traced], Tail],
    rendered: EncodedText,
) -> Layout | None:
    """Render messages with placeholders, and return what the template writes around them.

    Args:
        rendering: The template.
        encoder: Its tokenizer; content must be inert, and no control token strip blanks of content.
        values: The content of the messages.
        messages: Template messages before them, the messages, and the trace source of the first.
        tools: The tools of the rendering.
        locate: Finds the delta in a rendering.
        rendered: The tokens of the template's own rendering.

    Returns:
        A layout that gives these tokens for these messages; None where the template does more with content than write
        it.
    """
    before, turn, first = messages
    watch = Watch(values)
    opaque = template_messages(turn, first=first, message_format=rendering.message_format, leaves=watch)
    pieces = watch.rendered(rendering, [*before, *opaque], tools)
    if pieces is None:
        return None
    text, slots = _located(pieces, values)
    try:
        steps = _steps(encoder, locate(text), slots)
    except (TemplateError, _NotFollowedError):
        return None
    layout = Layout(encoder, steps, tuple(dict.fromkeys(watch.conditions)))
    filled = layout.fill(values)
    return layout if filled is not None and filled.equals(rendered) else None


def _located(pieces: Sequence[str | Slot], values: Sequence[str]) -> tuple[Traced, dict[int, Slot]]:
    """Return pieces with their content as one text, and the slots by their place in it."""
    texts: list[str] = []
    slots: dict[int, Slot] = {}
    at = 0
    for piece in pieces:
        if isinstance(piece, Slot):
            slots[at] = piece
            piece = Traced.content(piece.text(values) if piece.number >= 0 else "?", piece.source)
        texts.append(piece)
        at += len(piece)
    text = concat(texts)
    return text if isinstance(text, Traced) else Traced.of(text, ()), slots


def _steps(encoder: ContentSafeEncoder, tail: Tail, slots: Mapping[int, Slot]) -> tuple[Fixed | Stretch, ...]:
    """Cut a delta at its control tokens; what has no slot between them is encoded here, once."""
    text, begin, at = tail.text, tail.start, tail.start
    steps: list[Fixed | Stretch] = []

    def fix(stop: int) -> None:
        if begin < stop:
            inside = [control for control in tail.controls if begin <= control[0] and control[1] <= stop]
            encoded = encoder.encode(text[:stop], begin, inside)  # type: ignore[arg-type]  # a slice of `Traced` is one
            steps.append(Fixed(encoded.ids.tobytes(), encoded.provenance.tobytes(), str(encoded.text)))

    for start, stop, _ in (*tail.controls, (len(text), len(text), 0)):
        stretch = _stretch(text, at, start, slots)
        if any(type(piece) is Slot for piece in stretch):
            fix(at)
            steps.append(stretch)
            begin = start
        at = stop
    fix(len(text))
    return tuple(steps)


def _stretch(text: Traced, start: int, stop: int, slots: Mapping[int, Slot]) -> Stretch:
    plain, at = str.__str__(text), start
    pieces: list[str | Slot] = []
    for begin, end, source in text.spans:
        if end <= start or begin >= stop:
            continue
        slot = slots.get(begin)
        if begin < start or end > stop or (slot is not None and slot.number < 0):
            raise _NotFollowedError
        pieces += [plain[at:begin], slot or Traced.content(plain[begin:end], source)]
        at = end
    return tuple(piece for piece in (*pieces, plain[at:stop]) if piece)


class _NotFollowedError(Exception):
    """A template did with content what cannot be filled with other content."""


@dataclass(slots=True, eq=False)
class Watch:
    """One rendering with placeholders.

    Attributes:
        values: The content of the shape.
        conditions: What the template asked.
    """

    values: Sequence[str]
    conditions: list[Condition] = field(default_factory=list)
    _placed: int = 0
    _refused: bool = False

    def text(self, text: str, source: int) -> Any:
        """Return a placeholder for content that is not blank; see `_Values`, which numbers it the same way."""
        if not text or text.isspace():
            return Traced.content(text, source)
        self._placed += 1
        return Placeholder(self, (Slot(self._placed - 1, source),))

    def name(self, name: str, source: int) -> Traced:
        """Return a tool's name, which is part of the shape."""
        return Traced.content(name, source)

    def data(self, value: Any, source: int) -> Any:
        """Return a call's arguments with placeholders for their strings and numbers; names are part of the shape."""
        kind = type(value)
        if kind is str:
            return self.text(value, source)
        if kind is int or kind is float:
            return Placeholder(self, (Slot(-1, source),), value)
        if kind is dict:
            return {trace(key, source): self.data(item, source) for key, item in value.items()}
        return [self.data(item, source) for item in value] if kind is list else value

    def rendered(
        self, rendering: Rendering, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[str | Slot] | None:
        """Render messages; None where the template does with a placeholder what is not followed."""
        template = rendering.compiled
        if template.blocks:  # they keep the environment that they were compiled in
            return None
        environment = WatchingEnvironment(template.environment, self)
        variables = inputs(rendering.variables, tools, True, messages)
        context = new_context(environment, template.name, template.blocks, variables, globals=template.globals)
        try:
            text = environment.concat(template.root_render_func(context, environment=environment))
        except Exception:  # whatever a template does with what is no string
            return None
        finally:
            context.vars.clear()
        return text.pieces if type(text) is Placeholder and not self._refused else None

    def refuse(self, what: str) -> NoReturn:
        """Give up, even where the template's interpreter drops the exception."""
        self._refused = True
        raise _NotFollowedError(what)

    def ask(self, slot: Slot, method: Callable[[str, str], bool], given: Any) -> bool:
        """Answer a template, and keep the condition."""
        if not isinstance(given, str):
            self.refuse(f"{method} with {type(given)}")
        answer = method(slot.text(self.values), str.__str__(given))
        self.conditions.append(Condition(slot, method, str.__str__(given), answer))
        return answer


class Placeholder:
    """Stands for content, for text with content in it, or for a number; never blank.

    Args:
        watch: The rendering that it is part of.
        pieces: Its text.
        value: Something of its type.
    """

    __slots__ = ("_value", "_watch", "pieces")

    def __init__(self, watch: Watch, pieces: tuple[str | Slot, ...], value: Any = "") -> None:
        self._watch, self.pieces, self._value = watch, pieces, value

    def refuse(self, what: str) -> NoReturn:
        """Give up."""
        self._watch.refuse(what)

    def is_a(self, test: Callable[[Any], bool]) -> bool:
        """Answer a test of its type."""
        return test(self._value)

    @property
    def is_text(self) -> bool:
        """Whether it stands for a string."""
        return isinstance(self._value, str)

    def written(self) -> Placeholder:
        """Return it as text."""
        return self if self.is_text else Placeholder(self._watch, self.pieces)

    def then(self, step: Callable[[str], str]) -> Placeholder:
        """Return what a function makes of it that leaves no text blank."""
        slot = self._slot()
        return Placeholder(self._watch, (slot._replace(steps=(*slot.steps, step)),))

    def unknown(self) -> Placeholder:
        """Return text of which nothing is known but that it is content, and not blank."""
        return Placeholder(self._watch, (Slot(-1, self._source()),))

    def strip(self, chars: Any = None) -> Placeholder:
        """Strip both ends; see `str.strip`."""
        return self._stripped("strip", chars)

    def lstrip(self, chars: Any = None) -> Placeholder:
        """Strip the left end."""
        return self._stripped("lstrip", chars)

    def rstrip(self, chars: Any = None) -> Placeholder:
        """Strip the right end."""
        return self._stripped("rstrip", chars)

    def startswith(self, prefix: Any) -> bool:
        """Return how it begins."""
        return self._watch.ask(self._slot(), str.startswith, prefix)

    def endswith(self, suffix: Any) -> bool:
        """Return how it ends."""
        return self._watch.ask(self._slot(), str.endswith, suffix)

    def _stripped(self, method: str, chars: Any) -> Placeholder:
        if chars is not None and not (type(chars) is str and chars.isspace()):
            self.refuse(method)  # nothing may be left
        return self.then(methodcaller(method, chars))

    def _slot(self) -> Slot:
        """Return the one slot that it is, of which functions can be followed."""
        first = self.pieces[0]
        if len(self.pieces) == 1 and isinstance(first, Slot) and first.number >= 0 and self.is_text:
            return first
        self.refuse("a method of several texts")

    def _source(self) -> int:
        return next(piece.source for piece in self.pieces if isinstance(piece, Slot))

    def __bool__(self) -> bool:
        return True if self.is_text else self.refuse("a number's truth")

    def __add__(self, other: Any) -> Placeholder:
        return joined(self, (self, other))

    def __radd__(self, other: Any) -> Placeholder:
        return joined(self, (other, self))

    def __contains__(self, other: Any) -> bool:
        return self._watch.ask(self._slot(), str.__contains__, other)

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, bool | list | tuple | dict):
            return False if self.is_text else self.refuse("a number's value")
        return self._watch.ask(self._slot(), str.__eq__, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getattr__(self, name: str) -> Any:
        self.refuse(name)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Placeholder, *_: Any) -> Any:
        self.refuse(name)

    return refuse


# What Python would do in a way of its own.
for _name in ("hash", "str", "repr", "format", "len", "iter", "getitem", "call", "mod", "rmod", "mul", "rmul", "html"):
    setattr(Placeholder, f"__{_name}__", _refusing(_name))
for _name in ("lt", "le", "gt", "ge", "int", "float", "index", "bytes", "reversed", "reduce_ex"):
    setattr(Placeholder, f"__{_name}__", _refusing(_name))


def joined(one: Placeholder, texts: Iterable[Any]) -> Placeholder:
    """Return texts together, this one among them."""
    pieces: list[str | Slot] = []
    for text in texts:
        if type(text) is Placeholder and text.is_text:
            pieces += text.pieces
        elif isinstance(text, str):
            pieces.append(text)
        else:
            one.refuse(f"+ with {type(text)}")
    return Placeholder(one._watch, tuple(pieces))


_OF_TYPES = frozenset(
    ("defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "mapping")
) | {"iterable", "sequence"}
"""Tests that ask for nothing but a type."""
_COMPARING = frozenset(("eq", "equalto", "==", "ne", "!=", "in"))
"""Tests that are operators, which ask a `Placeholder` themselves."""
_METHODS = frozenset(("strip", "lstrip", "rstrip", "startswith", "endswith"))
_CHOOSING = (SELECTING - {"random"}) | {"length", "count"}
"""Filters that return items of their input, or count them."""


class WatchingEnvironment(TracingEnvironment):
    """Renders with placeholders what was compiled for a tracing environment."""

    def __init__(self, compiled: Any, watch: Watch) -> None:
        super().__init__()
        self.extensions = compiled.extensions
        self.filters = {name: _watched_filter(name, each, watch) for name, each in compiled.filters.items()}
        self.tests = {name: _watched_test(name, each) for name, each in compiled.tests.items()}
        self._watch = watch

    @staticmethod
    def text(value: Any) -> Any:
        """Return a value as it is written."""
        return value.written() if type(value) is Placeholder else as_text(value)

    @staticmethod
    def concat(pieces: Iterable[Any]) -> Any:
        """Join texts."""
        items = list(pieces)
        first = _first(items)
        return concat(items) if first is None else joined(first, items)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute; of text, only the methods that are followed."""
        if type(obj) is not Placeholder:
            return super().getattr(obj, attribute)
        if not obj.is_text or hasattr(str, attribute):
            return getattr(obj, attribute) if obj.is_text and attribute in _METHODS else obj.refuse(attribute)
        return self.undefined(obj="", name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item of what is no placeholder: Jinja drops the exceptions of an index that cannot be used."""
        if type(obj) is Placeholder and isinstance(argument, str):
            return self.getattr(obj, argument)
        found = _first((obj, argument))
        return super().getitem(obj, argument) if found is None else found.refuse("an index")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Format with `%`, which is not followed."""
        if any(map(_may_hold, (left, right))):
            self._watch.refuse(operator)
        return super().call_binop(context, operator, left, right)


def _watched_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def watched(*args: Any, **kwargs: Any) -> Any:
        found = _first((*args, *kwargs.values()))
        if found is None or name in _COMPARING:
            return test(*args, **kwargs)
        if name in _OF_TYPES and len(args) + len(kwargs) == 1:
            return found.is_a(test)
        return found.refuse(f"the test {name!r}")

    return watched


def _watched_filter(name: str, function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        given = (*args[passed:], *kwargs.values())
        if not any(map(_may_hold, given)) or (name in _CHOOSING and _first(given) is None):
            return function(*args, **kwargs)
        if passed or any(map(_may_hold, given[1:])) or (holder := _held(given[0])) is None:
            watch.refuse(f"the filter {name!r}")
        if given[0] is holder:
            return _filtered(name, holder, partial(function, **kwargs), args[1:], kwargs)
        return holder.unknown() if name == "tojson" else watch.refuse(f"the filter {name!r}")

    return watched


def _filtered(name: str, value: Placeholder, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Do to a placeholder what a filter does to text."""
    if name in ("default", "d") and value.is_text:
        return value
    if name in ("string", "safe"):
        return value.written()
    if name == "trim" and not kwargs:
        return value.strip(*args)
    if name == "tojson":
        is_known = value.is_text and len(value.pieces) == 1
        return value.then(lambda text: str.__str__(function(text, *args))) if is_known else value.unknown()
    return value.refuse(f"the filter {name!r}")


def _first(items: Iterable[Any]) -> Placeholder | None:
    return next((item for item in items if type(item) is Placeholder), None)


def _held(value: Any) -> Placeholder | None:
    """Return a placeholder in a value that can become JSON, or None."""
    if type(value) is Placeholder:
        return value
    return next((found for item in _inside(value) if (found := _held(item)) is not None), None)


def _may_hold(value: Any) -> bool:
    """Return whether a value is or holds a placeholder, or that is not known, as of a generator."""
    known = isinstance(value, str | int | float | Undefined | dict | list | tuple | None)
    return not known or any(map(_may_hold, _inside(value)))


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
