"""A completion on its way from text and marks to calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, ParamSpec

import msgspec

from tito_core.parsing.call_text import Malformed, ParsedCallText
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.markup import DecodedIds, Mark, Markup
from tito_core.parsing.parsed import CallStatus, ParsedCall

FENCES = ("```", "~~~")
P = ParamSpec("P")
JsonSchema = Mapping[str, Any]
Tools = Mapping[str, JsonSchema]
"""The JSON Schema of each tool's arguments, by the tool's name."""


class Frame(msgspec.Struct, frozen=True):
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
        lenient: Whether a loose call is lenient; else it is malformed.
        calls: What was read, in order.
        uncertain: Whether a call began before the one before it ended: later ones may be part of an argument, so that
            none runs.
    """

    def __init__(
        self,
        markup: Markup,
        decoded: DecodedIds,
        truncated: bool,
        tools: Tools | None = None,
        lenient: bool = False,
    ) -> None:
        self.decoded = decoded
        self.text = decoded.text
        self.truncated = truncated
        self.tools: Tools = tools or {}
        self.lenient = lenient
        self.calls: list[ParsedCall] = []
        self.uncertain = False
        self.markup = markup
        self._marks = markup.marks(decoded)
        self._starts = [mark.start for mark in self._marks]
        self._open: list[bool] | None = None  # by mark

    def next(self, char: int, tags: Set[str] | None = None) -> Mark | None:
        """Return the first mark at or after a character, of certain tags or of any."""
        for i in range(bisect_left(self._starts, char), len(self._marks)):
            if tags is None or self._marks[i].tag in tags:
                return self._marks[i]
        return None

    def previous(self, char: int) -> Mark | None:
        """Return the last mark before a character."""
        i = bisect_left(self._starts, char)
        return self._marks[i - 1] if i else None

    def stands_open(self, char: int, steps: Mapping[str, int]) -> bool:
        """Return whether a tag or a fence of code in this message stands open before the mark at a character.

        Args:
            char: First character of a mark.
            steps: The format's tags: 1 for one that opens, -1 for one that closes, 0 for another. Reasoning tags, which
                are not among them, begin anew.
        """
        if self._open is None:
            self._open, tags, fences, at = [], 0, 0, 0
            for mark in self._marks:
                fences += sum(self.text.count(fence, at, mark.start) for fence in FENCES)
                self._open.append(tags > 0 or fences % 2 > 0)
                tags = max(0, tags + steps[mark.tag]) if mark.tag in steps else 0
                fences, at = fences if mark.tag in steps else 0, mark.stop
        return self._open[bisect_left(self._starts, char)]

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

    def read(self, frame: Frame, close: str, body: Callable[[Cursor], ParsedCallText], *, ends: bool = False) -> int:
        """Read the call in a frame; return the character after it.

        Args:
            frame: Where the call stands.
            close: Its closing tag.
            body: Reads what stands before that.
            ends: Whether a body that is sound is whole, so that one at the end of a completion lacks its tag alone.
        """
        if frame.closed:
            self.judge(frame.opened, frame.stop, body, Cursor(self, frame.body, frame.end))
            return frame.stop
        reason = f"The call has no closing {close} tag."
        last = frame.stop == len(self.text)
        try:
            said = body(Cursor(self, frame.body, frame.end)) if ends and not (last and self.truncated) else None
        except Malformed:
            said = None
        if said is None:
            self.unclosed(frame.opened, frame.stop, reason)
        elif last:
            self.add(frame.opened, frame.stop, replace(said, loose=reason))
        else:  # the body is whole, so the next call is no part of it
            self.malformed(frame.opened, frame.stop, reason)
        return frame.stop

    def judge(
        self, start: int, stop: int, read: Callable[P, ParsedCallText], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Add what `read` makes of characters `start` to `stop`, be it a sound call or a malformed one."""
        try:
            said = read(*args, **kwargs)
        except Malformed as fault:
            self.malformed(start, stop, fault.reason, fault.name)
        else:
            self.add(start, stop, said)

    def add(self, start: int, stop: int, said: ParsedCallText) -> None:
        """Add a sound call, or a loose one: lenient where that is asked for, else malformed."""
        if self.uncertain:
            self.malformed(start, stop, "The call follows one that did not end, and may be part of it.", said.name)
            return
        if said.loose and not self.lenient:
            self.malformed(start, stop, said.loose, said.name)
            return
        status = CallStatus.LENIENT if said.loose else CallStatus.OK
        self._add(start, stop, status, said.name, said.arguments, said.loose, said.id, said.text)

    def loosen(self, first: int, reason: str) -> None:
        """Make the sound calls from index `first` on loose ones."""
        for i, call in enumerate(self.calls[first:], first):
            if not call.status.runs:
                continue
            if self.lenient:
                self.calls[i] = replace(call, status=CallStatus.LENIENT, reason=call.reason or reason)
            else:
                self.spoil(i, reason)

    def spoil(self, index: int, reason: str) -> None:
        """Make a call that would run a malformed one."""
        call = self.calls[index]
        if call.status.runs:
            self.calls[index] = replace(
                call, status=CallStatus.MALFORMED, arguments=None, arguments_text=None, reason=reason
            )

    def unclosed(self, start: int, stop: int, reason: str, name: str | None = None) -> None:
        """Add a call that does not end: truncated where the engine cut it off, else malformed. No later one runs."""
        self.uncertain = True
        if self.truncated and stop == len(self.text):
            self._add(start, stop, CallStatus.TRUNCATED, name, None, "The token limit cut the call off.")
        else:
            self.malformed(start, stop, reason, name)

    def malformed(self, start: int, stop: int, reason: str, name: str | None = None) -> None:
        """Add a malformed call."""
        self._add(start, stop, CallStatus.MALFORMED, name, None, reason)

    def suspect(self, start: int, stop: int, reason: str, name: str | None = None) -> ParsedCall:
        """Build the record of a text that looks like a call."""
        first, last = self.decoded.span_of(start, stop)
        return ParsedCall(CallStatus.SUSPECT, name, None, self.text[start:stop], first, last, reason)

    def _add(
        self,
        start: int,
        stop: int,
        status: CallStatus,
        name: str | None,
        arguments: Mapping[str, Any] | None,
        reason: str = "",
        call_id: str | None = None,
        arguments_text: str | None = None,
    ) -> None:
        first, last = self.decoded.span_of(start, stop)
        raw = self.text[start:stop]
        self.calls.append(ParsedCall(status, name, arguments, raw, first, last, reason, call_id, arguments_text))
