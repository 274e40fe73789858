"""A template's deltas, replayed: what one rendering wrote around some content, written around other content.

Most of a delta's cost is the template, which says the same around each tool result. So a rendering is repeated with
opaque content, which the template may place but not read, and what it wrote is kept, by the shape of its messages.
Where it learnt something of the content, such as how it begins, that is kept as a guard, and content of which it would
learn something else is rendered. So is whatever is not followed.

What holds for all content of a shape, if the guards hold: the template takes the same way, so it writes the same parts;
each is the same text, or content from end to end that is not empty. So the same sources are shown, and control tokens,
which only the scaffold between spells, come in the same order: the answer ends at the same part. A replay is also
checked once against the template's own delta before it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from tito_core.chat.delta import DeltaSource, Placed, Tail
from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.opaque import Guard, Leaf, Watch
from tito_core.chat.rendering import is_shown
from tito_core.chat.traced import Traced
from tito_core.chat.words import LONG_TEXT

REMEMBERED = 1 << 10
"""Shapes of messages that are remembered at once."""
VARIANTS = 4
"""Renderings of messages of one shape that are watched at most; later ones are only rendered."""
LARGEST = 10**18
"""Numbers up to there can be written, of any length cannot."""
DEEPEST = 8
"""Lists and mappings within each other that are looked through."""

Shape = tuple[Any, ...]


class _UnusualError(Exception):
    """Messages hold what has no shape."""


class Fixed(NamedTuple):
    """Tokens that do not depend on content, packed, and the provenance of each."""

    ids: bytes
    kinds: bytes


Stretch = tuple[str | Leaf, ...]
"""What stands between two control tokens: scaffold and content."""


class Replay(NamedTuple):
    """What a template writes around content, and what it learnt of it."""

    encoder: ContentSafeEncoder
    steps: tuple[Fixed | Stretch, ...]
    guards: tuple[Guard, ...]

    def encoded(self, values: Sequence[str]) -> EncodedText | None:
        """Write it around other content; None where the template would learn something else."""
        for guard in self.guards:
            if guard.learnt(values) is not guard.outcome:
                return None
        ids: list[bytes] = []
        kinds: list[bytes] = []
        for step in self.steps:
            packed, of_each = step if isinstance(step, Fixed) else self._stretch(step, values)
            ids.append(packed)
            kinds.append(of_each)
        return EncodedText.joined(ids, kinds)

    def _stretch(self, pieces: Stretch, values: Sequence[str]) -> tuple[bytes, bytes]:
        at = 0
        texts: list[str] = []
        spans: list[tuple[int, int]] = []
        for piece in pieces:
            text = piece
            if isinstance(text, Leaf):
                text = text.of(values)
                spans.append((at, at + len(text)))
            texts.append(text)
            at += len(text)
        return self.encoder.stretch("".join(texts), spans)


class Replays:
    """The deltas of one template. Safe to share between threads."""

    def __init__(self, source: DeltaSource) -> None:
        self._source = source
        self._follows = source.encoder.inert and not source.encoder.eats_blanks and source.candidate.tools != "own"
        self._known: dict[Shape, list[Replay | None]] = {}

    def encoded(self, placed: Placed) -> EncodedText:
        """Give the tokens of a delta.

        Raises:
            TemplateError: See `DeltaSource.rendered`.
        """
        values: list[Traced] = []
        try:
            shape = (placed.source, *_shape((placed.calls, placed.new), values))
        except _UnusualError:
            return self._rendered(placed)[1]
        known = self._known.get(shape)
        for replay in known or ():
            if replay is not None and all(values) and (found := replay.encoded(values)) is not None:
                return found
        tail, encoded = self._rendered(placed)
        is_long = sum(map(len, values)) >= LONG_TEXT  # to record it would encode it once more
        if self._follows and all(values) and not is_long and (known is None or len(known) < VARIANTS):
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known.setdefault(shape, []).append(record(self._source, placed, values, tail, encoded))
        return encoded

    def _rendered(self, placed: Placed) -> tuple[Tail, EncodedText]:
        tail = self._source.rendered(placed)
        return tail, self._source.encoder.encode(tail.text, tail.start, tail.controls)


def record(
    source: DeltaSource, placed: Placed, values: Sequence[str], tail: Tail, encoded: EncodedText
) -> Replay | None:
    """Render messages once more with opaque content, and keep what that wrote.

    Args:
        source: Renders them.
        placed: The messages.
        values: Their content in the order of their shape, none of it empty.
        tail: What they were rendered to.
        encoded: Its tokens.

    Returns:
        A replay that gives these tokens for this content; None where what the template does cannot be followed.
    """
    shown = {origin for _, _, origin in tail.text.spans}
    if not all(is_shown(message, shown, blank=True) for message in placed.messages(placed.calls, placed.new)):
        return None  # where a message is not shown, it depends on its content whether that is an error
    watch = Watch(values)
    calls, new = _veiled((placed.calls, placed.new), watch, count())
    parts = source.rendering.watched(placed.messages(calls, new), placed.tools, watch)
    steps = None if parts is None else _steps(source.encoder, parts, values, tail)
    if steps is None:
        return None
    replay = Replay(source.encoder, steps, tuple(dict.fromkeys(watch.guards)))
    found = replay.encoded(values)
    return replay if found is not None and found.equals(encoded) else None


def _shape(items: Iterable[Any], values: list[Traced]) -> Shape:
    """Tell two histories apart by all but their content, which goes to `values`; of that, by its source.

    Arguments of a call are all alike, but for those that cannot be written.
    """
    shape: list[Any] = []
    for item in items:
        kind = type(item)
        if kind is Traced:
            values.append(item)
            shape.append(item.spans[0][2] if item else None)
        elif kind is str:
            shape.append(item)
        elif kind is list:
            shape.append((kind, *_shape(item, values)))
        elif kind is not dict:
            raise _UnusualError
        elif not _is_arguments(item):
            shape.append((kind, *item, _shape(item.values(), values)))
        elif all(item) and _is_json(item):
            shape.append(kind)
        else:
            raise _UnusualError
    return tuple(shape)


def _veiled(items: Iterable[Any], watch: Watch, numbers: Iterator[int]) -> list[Any]:
    """Put opaque content in the place of each piece that `_shape` finds, in its order."""
    veiled: list[Any] = []
    for item in items:
        if type(item) is Traced:
            veiled.append(watch.content(next(numbers)))
        elif type(item) is dict and _is_arguments(item):
            veiled.append(watch.arguments())
        elif type(item) is dict:
            veiled.append(dict(zip(item, _veiled(item.values(), watch, numbers), strict=True)))
        else:
            veiled.append(_veiled(item, watch, numbers) if type(item) is list else item)
    return veiled


def _is_arguments(item: dict[Any, Any]) -> bool:
    """Tell a call's arguments, whose names are content, from what we wrote."""
    return bool(item) and type(next(iter(item))) is not str


def _is_json(value: Any, depth: int = DEEPEST) -> bool:
    """Tell whether arguments can be written, so that no other ones of this kind are refused."""
    kind = type(value)
    if kind is int:
        return bool(-LARGEST < value < LARGEST)
    if kind is dict and depth:
        return all(type(key) is Traced and _is_json(item, depth - 1) for key, item in value.items())
    if kind is list and depth:
        return all(_is_json(item, depth - 1) for item in value)
    return kind is Traced or kind is bool or kind is float or value is None


def _steps(
    encoder: ContentSafeEncoder, parts: Sequence[str | Leaf], values: Sequence[str], tail: Tail
) -> tuple[Fixed | Stretch, ...] | None:
    """Cut what was written at its control tokens, from where the answer ends on; None where content touches one."""
    located = _located(parts, values, tail)
    if located is None:
        return None
    steps: list[Fixed | Stretch] = []
    at = tail.start
    for start, stop, token in (*tail.controls, (len(tail.text), len(tail.text), None)):
        between, inside = _cut(located, at, start), _cut(located, start, stop)
        if between is None or inside is None or any(isinstance(piece, Leaf) for piece in inside):
            return None
        if any(isinstance(piece, Leaf) for piece in between):
            steps.append(tuple(between))
        elif between:
            _fix(steps, Fixed(*encoder.scaffold("".join(map(str, between)))))
        if token is not None:
            _fix(steps, Fixed(*encoder.control(token)))
        at = stop
    return tuple(steps)


def _fix(steps: list[Fixed | Stretch], fixed: Fixed) -> None:
    """Append tokens to those before them."""
    last = steps[-1] if steps else None
    if isinstance(last, Fixed):
        steps[-1] = Fixed(last.ids + fixed.ids, last.kinds + fixed.kinds)
    else:
        steps.append(fixed)


Located = list[tuple[int, int, str | Leaf]]


def _located(parts: Sequence[str | Leaf], values: Sequence[str], tail: Tail) -> Located | None:
    """Find what was written in the template's own rendering: where each part begins and ends, from its end back.

    Before the answer's end may stand what is not known.
    """
    plain = str.__str__(tail.text)
    located: Located = []
    at = len(plain)
    for part in reversed(parts):
        if at <= tail.start:
            break
        if isinstance(part, Leaf) and not part.is_known:
            return None
        text = part.of(values) if isinstance(part, Leaf) else str.__str__(part)
        if not plain.endswith(text, 0, at) or _is_content(part, tail.start - (at - len(text))):
            return None
        located.append((at - len(text), at, part if isinstance(part, Leaf) else text))
        at -= len(text)
    return located[::-1] if at <= tail.start else None


def _is_content(part: str | Leaf, start: int) -> bool:
    """Tell whether a part that is the same for all content holds content, from a character on."""
    return isinstance(part, Traced) and any(stop > start for _, stop, _ in part.spans)


def _cut(located: Located, start: int, stop: int) -> list[str | Leaf] | None:
    """Give what stands from `start` to `stop`; None where they cut content in two."""
    pieces: list[str | Leaf] = []
    for first, last, part in located:
        if last <= start or first >= stop:
            continue
        if not isinstance(part, Leaf):
            text = part[max(start - first, 0) : stop - first]
            before = pieces.pop() if pieces and isinstance(pieces[-1], str) else ""
            pieces.append(f"{before}{text}")
        elif first < start or last > stop:
            return None
        else:
            pieces.append(part)
    return pieces
