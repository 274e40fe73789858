"""One completion while its calls are read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any, ParamSpec

import msgspec

from tito_core.parsing.call_text import Malformed, ParsedCallText
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.markup import DecodedIds, Mark, Markup
from tito_core.parsing.parsed import CallStatus, ParsedCall
from tito_core.parsing.schema import Fit, JsonSchema, meaning, settled

FENCES = ("```", "~~~")
P = ParamSpec("P")
Tools = Mapping[str, JsonSchema]
"""The JSON Schema of each tool's arguments, by the tool's name."""


class Frame(msgspec.Struct, frozen=True):
    """The place of a call, as character offsets in the completion.

    Attributes:
        start: First character, tags included.
        body: First character of the body.
        body_end: One past the last character of the body.
        stop: One past the last character, tags included.
        closed: Whether the closing tag is present.
    """

    start: int
    body: int
    body_end: int
    stop: int
    closed: bool


class Completion:
    """One completion: its text, its tags, and the calls read so far.

    Attributes:
        decoded: The token ids and their text.
        text: The text.
        truncated: Whether the engine stopped for length.
        tools: JSON Schemas of the arguments, by tool name.
        lenient: Whether a loose call gets the status LENIENT; otherwise it is MALFORMED.
        in_python: Returns whether the chat template writes lists and objects as Python does.
        calls: The calls read so far, in order.
        uncertain: Whether a call did not end. Later calls may be part of its arguments, so none of them runs.
        markup: The format's tags in this vocabulary.
    """

    def __init__(
        self,
        markup: Markup,
        decoded: DecodedIds,
        truncated: bool,
        tools: Tools | None = None,
        lenient: bool = False,
        in_python: Callable[[], bool] = lambda: False,
    ) -> None:
        self.decoded = decoded
        self.text = decoded.text
        self.truncated = truncated
        self.tools: Tools = tools or {}
        self.lenient = lenient
        self.in_python = in_python
        self.calls: list[ParsedCall] = []
        self.uncertain = False
        self.markup = markup
        self._marks = markup.marks(decoded)
        self._starts = [mark.start for mark in self._marks]
        self._open: list[bool] | None = None  # by mark

    def next_mark(self, char: int, tags: Set[str] | None = None) -> Mark | None:
        """Return the first mark at or after a character; with `tags`, the first of those tags."""
        for i in range(bisect_left(self._starts, char), len(self._marks)):
            if tags is None or self._marks[i].tag in tags:
                return self._marks[i]
        return None

    def previous_mark(self, char: int) -> Mark | None:
        """Return the last mark before a character."""
        i = bisect_left(self._starts, char)
        return self._marks[i - 1] if i else None

    def is_nested(self, char: int, steps: Mapping[str, int]) -> bool:
        """Return whether the mark at a character is inside an open tag or an open code fence.

        Args:
            char: First character of a mark.
            steps: The format's tags: 1 for an opening tag, -1 for a closing one, 0 for another. A reasoning tag, which
                is not among them, resets the count.
        """
        if self._open is None:
            self._open, tags, fences, at = [], 0, 0, 0
            for mark in self._marks:
                fences += sum(self.text.count(fence, at, mark.start) for fence in FENCES)
                self._open.append(tags > 0 or fences % 2 > 0)
                tags = max(0, tags + steps[mark.tag]) if mark.tag in steps else 0
                fences, at = fences if mark.tag in steps else 0, mark.stop
        return self._open[bisect_left(self._starts, char)]

    def frame(self, start: int, body: int, close: str, before: Set[str], search: int | None = None) -> Frame:
        """Find where a call ends: at its closing tag, else before one of the tags `before`, else at the end.

        Args:
            start: First character of the call, tags included.
            body: First character of its body.
            close: Its closing tag.
            before: Tags that cannot be inside the call, such as the next call's opening tag.
            search: Where to start looking for these tags; by default at the body.
        """
        mark = self.next_mark(body if search is None else search, before | {close})
        if mark is None:
            return Frame(start, body, len(self.text), len(self.text), False)
        if mark.tag != close:
            return Frame(start, body, mark.start, mark.start, False)
        return Frame(start, body, mark.start, mark.stop, True)

    def read_frame(
        self, frame: Frame, close: str, body: Callable[[Cursor], ParsedCallText], *, self_delimiting: bool = False
    ) -> int:
        """Parse the call in a frame, add it, and return the character after it.

        Args:
            frame: The place of the call.
            close: Its closing tag.
            body: Parses the body.
            self_delimiting: Whether a valid body shows its own end, as a JSON object does. If only the closing tag is
                missing at the end of the completion, such a call is loose.
        """
        if frame.closed:
            self.add_parsed(frame.start, frame.stop, body, Cursor(self, frame.body, frame.body_end))
            return frame.stop
        reason = f"The call has no closing {close} tag."
        last = frame.stop == len(self.text)
        call = None
        if self_delimiting and not (last and self.truncated):
            with suppress(Malformed):
                call = body(Cursor(self, frame.body, frame.body_end))
        if call is None:
            self.add_unclosed(frame.start, frame.stop, reason)
        elif last:
            self.add(frame.start, frame.stop, replace(call, loose=reason))
        else:  # the body is complete, so the next call is not part of it
            self.add_malformed(frame.start, frame.stop, reason)
        return frame.stop

    def add_parsed(
        self, start: int, stop: int, parse: Callable[P, ParsedCallText], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Add the call that `parse` returns for characters `start` to `stop`, or a malformed one if it raises."""
        try:
            call = parse(*args, **kwargs)
        except Malformed as fault:
            self.add_malformed(start, stop, fault.reason, fault.name)
        else:
            self.add(start, stop, call)

    def add(self, start: int, stop: int, call: ParsedCallText) -> None:
        """Add a valid call, if its arguments fit the tool's schema; a call of an unknown tool needs to fit none.

        A loose call is LENIENT if the parser is lenient, else MALFORMED.
        """
        if self.uncertain:
            self.add_malformed(start, stop, "The call follows one that did not end, and may be part of it.", call.name)
            return
        if call.loose and not self.lenient:
            self.add_malformed(start, stop, call.loose, call.name)
            return
        fit = self._fit(call)
        if fit.arguments is None:
            reason = f"The arguments do not fit the tool's schema: {'; '.join(fit.faults)}."
            self.add_malformed(start, stop, reason, call.name)
            return
        status = CallStatus.LENIENT if call.loose else CallStatus.OK
        self._add(start, stop, status, call.name, fit.arguments, call.loose, call.id, call.text)

    def _fit(self, call: ParsedCallText) -> Fit:
        schema = self.tools.get(call.name)
        if schema is None:
            return Fit(settled(call.arguments, {(): -1}, {}))  # plain text stays text
        return meaning(schema, call.name).fit(call.arguments)

    def mark_loose(self, first: int, reason: str) -> None:
        """Mark the valid calls from index `first` on as loose."""
        for i, call in enumerate(self.calls[first:], first):
            if not call.status.runs:
                continue
            if self.lenient:
                self.calls[i] = replace(call, status=CallStatus.LENIENT, reason=call.reason or reason)
            else:
                self.mark_malformed(i, reason)

    def mark_malformed(self, index: int, reason: str) -> None:
        """Mark the call at an index as malformed, if it would run."""
        call = self.calls[index]
        if call.status.runs:
            self.calls[index] = replace(
                call, status=CallStatus.MALFORMED, arguments=None, arguments_text=None, reason=reason
            )

    def add_unclosed(self, start: int, stop: int, reason: str, name: str | None = None) -> None:
        """Add a call without an end: TRUNCATED if the engine cut it off, else MALFORMED. No later call runs."""
        self.uncertain = True
        if self.truncated and stop == len(self.text):
            self._add(start, stop, CallStatus.TRUNCATED, name, None, "The token limit cut the call off.")
        else:
            self.add_malformed(start, stop, reason, name)

    def add_malformed(self, start: int, stop: int, reason: str, name: str | None = None) -> None:
        """Add a malformed call."""
        self._add(start, stop, CallStatus.MALFORMED, name, None, reason)

    def suspect_record(self, start: int, stop: int, reason: str, name: str | None = None) -> ParsedCall:
        """Return the record of text that looks like a call."""
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
