"""A completion on its way from text and marks to calls."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, ParamSpec

from tito_core.parsing.markup import DecodedIds, Mark, Markup
from tito_core.parsing.parsed import CallStatus, ParsedCall
from tito_core.parsing.said import Malformed, Said, is_sound_name

P = ParamSpec("P")
JsonSchema = Mapping[str, Any]
Tools = Mapping[str, JsonSchema]
"""The JSON Schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a call stands, in characters.

    Attributes:
        opened: Its first character, markup included.
        body: First character of its body.
        end: One past the body's last character.
        stop: One past its last character, markup included.
        closed: Whether its closing tag is there.
    """

    opened: int
    body: int
    end: int
    stop: int
    closed: bool


class Completion:
    """One completion: its text, the tags in it, and the calls found so far.

    Attributes:
        decoded: The ids and their text.
        truncated: Whether the engine stopped for length.
        tools: Schemas by the tool's name.
        calls: What was read, in order.
    """

    def __init__(self, markup: Markup, decoded: DecodedIds, truncated: bool, tools: Tools | None = None) -> None:
        self.decoded = decoded
        self.text = decoded.text
        self.truncated = truncated
        self.tools: Tools = tools or {}
        self.calls: list[ParsedCall] = []
        self.markup = markup
        self._marks = markup.marks(decoded)
        self._starts = [mark.start for mark in self._marks]

    def next(self, char: int, tags: Set[str] | None = None) -> Mark | None:
        """Give the first mark at or after a character, of certain tags or of any."""
        for i in range(bisect_left(self._starts, char), len(self._marks)):
            if tags is None or self._marks[i].tag in tags:
                return self._marks[i]
        return None

    def frame(self, opened: int, body: int, close: str, before: Set[str], begin: int | None = None) -> Frame:
        """Find where a call ends: at its closing tag, or unclosed before one of other tags or at the end.

        Args:
            opened: First character of its markup.
            body: First character of its body.
            close: Its closing tag.
            before: Tags that may not come inside it.
            begin: Where to begin to look; by default at the body.
        """
        found = self.next(body if begin is None else begin, before | {close})
        if found is None:
            return Frame(opened, body, len(self.text), len(self.text), False)
        if found.tag != close:
            return Frame(opened, body, found.start, found.start, False)
        return Frame(opened, body, found.start, found.stop, True)

    def read(self, frame: Frame, close: str, body: Callable[[Cursor], Said]) -> int:
        """Read the call in a frame; give the character after it."""
        if frame.closed:
            self.judge(frame.opened, frame.stop, body, Cursor(self, frame.body, frame.end))
        else:
            self.unclosed(frame.opened, frame.stop, f"The call has no closing {close} tag.")
        return frame.stop

    def judge(self, start: int, stop: int, read: Callable[P, Said], *args: P.args, **kwargs: P.kwargs) -> None:
        """Add what `read` makes of characters `start` to `stop`, be it a sound call or a malformed one."""
        try:
            said = read(*args, **kwargs)
        except Malformed as fault:
            self.malformed(start, stop, fault.reason, fault.name)
        else:
            self.add(start, stop, said)

    def add(self, start: int, stop: int, said: Said) -> None:
        """Add a sound call."""
        self._add(start, stop, CallStatus.OK, said.name, said.arguments, "", said.id)

    def unclosed(self, start: int, stop: int, reason: str, name: str | None = None) -> None:
        """Add a call that does not end: truncated where the engine cut it off, else malformed."""
        if self.truncated and stop == len(self.text):
            self._add(start, stop, CallStatus.TRUNCATED, name, None, "The token limit cut the call off.")
        else:
            self.malformed(start, stop, reason, name)

    def malformed(self, start: int, stop: int, reason: str, name: str | None = None) -> None:
        """Add a malformed call."""
        self._add(start, stop, CallStatus.MALFORMED, name, None, reason)

    def _add(
        self,
        start: int,
        stop: int,
        status: CallStatus,
        name: str | None,
        arguments: Mapping[str, Any] | None,
        reason: str = "",
        call_id: str | None = None,
    ) -> None:
        first, last = self.decoded.span_of(start, stop)
        raw = self.text[start:stop]
        self.calls.append(ParsedCall(status, name, arguments, raw, first, last, reason, call_id))


class Cursor:
    """Reads the body of one call from left to right; whatever is not as expected is malformed.

    Attributes:
        name: The tool's name, once it is known for certain; faults carry it.
        taken: The tag that was taken last.
    """

    def __init__(self, said: Completion, start: int, stop: int) -> None:
        self._said = said
        self._at = start
        self._stop = stop
        self.name: str | None = None
        self.taken: str | None = None

    @property
    def tools(self) -> Tools:
        """Schemas by the tool's name."""
        return self._said.tools

    def fault(self, reason: str) -> Malformed:
        """Make the error for a reason."""
        return Malformed(reason, self.name)

    def rest(self) -> str:
        """Take everything that is left, tags included."""
        text = self._said.text[self._at : self._stop]
        self._at = self._stop
        return text

    def peek(self) -> str | None:
        """Give the next tag; None when no tag is left."""
        mark = self._next()
        return None if mark is None else mark.tag

    def upto(self, *tags: str) -> str:
        """Take the text before the next tag, which must be one of these, and the tag.

        Raises:
            Malformed: Another tag comes first, or none.
        """
        mark = self._next()
        wanted = " or ".join(tags)
        if mark is None:
            raise self.fault(f"The call lacks {wanted}.")
        if mark.tag not in tags:
            raise self.fault(f"The call has {mark.tag} where {wanted} belongs.")
        text = self._said.text[self._at : mark.start]
        self._at, self.taken = mark.stop, mark.tag
        return text

    def through(self, text: str) -> str:
        """Take what comes before a text that is no tag, and the text; both must come before the next tag.

        Raises:
            Malformed: The text does not come.
        """
        mark = self._next()
        end = self._stop if mark is None else mark.start
        found = self._said.text.find(text, self._at, end)
        if found < 0:
            raise self.fault(f"The call lacks {text!r} after {self._said.text[max(0, self._at - 20) : self._at]!r}.")
        taken = self._said.text[self._at : found]
        self._at = found + len(text)
        return taken

    def peek_here(self) -> str | None:
        """Give the tag that stands right here; None when there is none."""
        mark = self._next()
        return mark.tag if mark is not None and mark.start == self._at else None

    def skip(self, text: str) -> bool:
        """Take a text that is no tag, if it stands right here."""
        here = self._said.text.startswith(text, self._at, self._stop) and self.peek_here() is None
        self._at += len(text) if here else 0
        return here

    def need(self, text: str) -> None:
        """Take a text that is no tag, which must stand right here.

        Raises:
            Malformed: It does not.
        """
        if not self.skip(text):
            raise self.fault(f"The call has {self._ahead()} where {text!r} belongs.")

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        """Take what a pattern matches right here, up to the next tag at most.

        Raises:
            Malformed: It matches nothing.
        """
        mark = self._next()
        found = pattern.match(self._said.text, self._at, self._stop if mark is None else mark.start)
        if not found:
            raise self.fault(f"The call has {self._ahead()} where {what} belongs.")
        self._at = found.end()
        return found.group()

    def _ahead(self) -> str:
        return shortened(self._said.text[self._at : min(self._stop, self._at + 20)])

    def tag(self, *tags: str) -> None:
        """Take the next tag, with nothing but blanks before it."""
        self.blank(self.upto(*tags))

    def end(self) -> None:
        """Check that only blanks are left."""
        self.blank(self.rest())

    def blank(self, text: str) -> None:
        """Check that a text is only blanks."""
        if text.strip():
            raise self.fault(f"The call has stray text: {shortened(text)}.")

    def sound_name(self, name: str) -> str:
        """Check a tool's name that stands without quotes, and note it for later faults."""
        if not is_sound_name(name):
            raise self.fault(f"The call has no sound name: {name[:60]!r}.")
        self.name = name
        return name

    def _next(self) -> Mark | None:
        mark = self._said.next(self._at)
        return mark if mark is not None and mark.stop <= self._stop else None


def shortened(text: str, longest: int = 60) -> str:
    """Quote a text, cut to a length."""
    return repr(text if len(text) <= longest else text[:longest] + "...")
