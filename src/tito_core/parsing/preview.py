"""Stream the certain part of a completion while it is sampled: reasoning and then text, never a call.

The pieces are always a prefix of the parser's final result, so nothing shown is ever taken back. Calls are not shown,
since the token limit may still turn them into text; nor is anything after the first call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from tito_core.parsing.decoding import REPLACEMENT
from tito_core.parsing.markup import DecodedIds, Mark

if TYPE_CHECKING:
    from tito_core.parsing.turn import TurnParser

_REDECODE_FRACTION = 16
"""With a decoder that must start at the first token, decode again only after 1/16 more tokens."""
Kind = Literal["reasoning", "text"]


class PreviewError(ValueError):
    """A parser's preview is not a prefix of its final result. Nothing is committed."""


class Piece(NamedTuple):
    """Text that continues the earlier pieces of its kind."""

    kind: Kind
    text: str


class Preview:
    """Previews one completion of a `TurnParser`.

    Args:
        parser: The parser whose result is previewed.
        in_reasoning: Whether the prompt opened reasoning.
    """

    def __init__(self, parser: TurnParser, in_reasoning: bool) -> None:
        self._parser = parser
        self._markup = parser.markup
        self._beginnings = {tag[:length] for tag in parser.markup.spelled for length in range(1, len(tag))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._ids: list[int] = []
        self._at = 0  # the first character of their text that was not read yet
        self._next = 0  # the number of ids at which to decode again
        self._over = False  # a call has begun
        self._held = False  # nothing more is certain until the reasoning closes
        self._text = _Stripped()
        self._thought = _Reasoning("" if parser.reasoning is None else parser.reasoning.label)
        self._in_block = in_reasoning

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Take the next sampled ids; return the pieces that are now certain."""
        if self._over:
            return []
        self._ids += ids
        if self._held and not self._may_close(len(ids)):
            return []
        end = len(self._ids)
        while end and self._ids[end - 1] in self._markup.special:
            end -= 1  # it may be the stop token, which is not text
        if end < self._next:
            return []
        decoded = DecodedIds(self._markup.decode, self._ids[:end])
        pieces = [piece for piece in self._read(decoded) if piece.text]
        self._drop_read(decoded)
        return pieces

    def _may_close(self, new: int) -> bool:
        """Return whether the newest ids end the tag that closes reasoning."""
        assert self._parser.reasoning is not None
        close = self._parser.reasoning.close
        return close in self._markup.decode(self._ids[-new - len(close) :])[0]

    def _read(self, decoded: DecodedIds) -> Iterator[Piece]:
        self._held = False
        text = decoded.text.rstrip(REPLACEMENT)  # the next token may complete these bytes
        marks = self._markup.marks(decoded)
        certain = self._certain(text, marks)
        last_close = self._last_close(marks)
        for mark in marks:
            if mark.start >= certain:
                break
            if mark.start < self._at:
                continue
            if self._in_block and mark.tag in self._parser.calls.opening and mark.start > last_close:
                certain, self._held = mark.start, True  # if the reasoning never ends, this may be a call
                break
            if self._is_boundary(mark):
                yield self._piece(text[self._at : mark.start])
                self._at = mark.stop
                yield self._enter(mark)
            if self._over:
                return
        yield self._piece(text[self._at : certain])
        self._at = max(self._at, certain)

    def _certain(self, text: str, marks: Sequence[Mark]) -> int:
        """Return where a tag may have begun that is not complete yet, else where the text ends."""
        first = max(0, len(text) - self._longest)
        near = [mark for mark in marks[-self._longest :] if mark.stop > first]
        for start in range(first, len(text)):
            if text[start:] in self._beginnings and not any(mark.start < start < mark.stop for mark in near):
                return start
        return len(text)

    def _last_close(self, marks: Sequence[Mark]) -> int:
        """Return the first character of the last tag that closes reasoning, or -1."""
        reasoning = self._parser.reasoning
        return next((mark.start for mark in reversed(marks) if reasoning and mark.tag == reasoning.close), -1)

    def _is_boundary(self, mark: Mark) -> bool:
        if self._in_block:
            assert self._parser.reasoning is not None
            return mark.tag == self._parser.reasoning.close
        return mark.tag in self._parser.starts or mark.tag in self._parser.stray

    def _enter(self, mark: Mark) -> Piece:
        """Enter what a tag begins; return the held end of the reasoning that it closes."""
        if self._in_block:
            self._in_block = False
            return Piece("reasoning", self._thought.end_block())
        reasoning, opening = self._parser.reasoning, self._parser.calls.opening
        if mark.tag in self._parser.calls.wrappers and mark.tag not in opening:
            return Piece("text", "")
        if reasoning is not None and mark.tag == reasoning.open and mark.tag not in opening:
            self._in_block = True
            self._thought.begin_block(late=self._text.begun)
        else:
            self._over = True
        return Piece("text", "")

    def _piece(self, text: str) -> Piece:
        if self._in_block:
            return Piece("reasoning", self._thought.add(text))
        if not self._text.begun and text.strip()[:1] and text.strip()[0] in self._parser.calls.bare:
            self._over = True  # it may be a call without tags
            return Piece("text", "")
        return Piece("text", self._text.add(text))

    def _drop_read(self, decoded: DecodedIds) -> None:
        """Drop the tokens that were read, up to a token that begins with a whole character."""
        begins = getattr(self._markup.decode, "begins", None)
        if begins is None:
            self._next = len(self._ids) + len(self._ids) // _REDECODE_FRACTION
            return
        first = decoded.token_of(self._at)
        while first > 0 and not begins(decoded.ids[first]):
            first -= 1
        if first > 0:
            self._at -= decoded.starts[first]
            del self._ids[:first]


class _Stripped:
    """Strips blanks around a text: trailing blanks are held until something follows them.

    Attributes:
        begun: Whether anything but blanks was added.
    """

    def __init__(self, blanks: str | None = None) -> None:
        self._blanks = blanks
        self._held = ""
        self.begun = False

    def add(self, text: str) -> str:
        """Add text; return what can be shown."""
        text = self._held + text if self.begun else text.lstrip(self._blanks)
        shown = text.rstrip(self._blanks)
        self._held = text[len(shown) :]
        self.begun = self.begun or bool(shown)
        return shown


class _Reasoning:
    """Joins blocks of reasoning by newlines, each as `ReasoningTags.text_of` returns it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._held = ""  # reasoning of only blanks is not shown
        self._shown = self._several = False
        self.begin_block()

    def begin_block(self, *, late: bool = False) -> None:
        """Begin the next block; one after text is a separate block of the message and is not shown."""
        self._late = late
        self._head: str | None = "" if self._label else None  # text that may be the label
        self._block = _Stripped("\n")

    def add(self, text: str) -> str:
        """Add text to the block; return what can be shown."""
        if self._head is not None:
            self._head += text
            if self._label.startswith(self._head) and self._head != self._label:
                return ""
            text, self._head = self._head.removeprefix(self._label), None
        began = self._block.begun
        new = self._block.add(text)
        if self._late or not new:
            return ""
        if not began and self._several:
            new = "\n" + new
        self._several = True
        self._held += new
        if not self._shown and not self._held.strip():
            return ""
        shown, self._held, self._shown = self._held, "", True
        return shown

    def end_block(self) -> str:
        """End the block; return the text that was held because it could have been the label."""
        rest, self._head = self._head, None
        return self.add(rest) if rest else ""
