"""One completion while its calls are read, and what it becomes: reasoning, text and calls.

A format finds a call in the `Completion` and takes its body apart with a `Cursor`. The result is a `ParsedTurn`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import compress
from typing import Any, ParamSpec

import msgspec

from tito_core.parsing.call_values import Malformed, ParsedCallText, is_valid_name, reading, shortened
from tito_core.parsing.markup import DecodedIds, Mark, Markup
from tito_core.parsing.schema import Choice, Fit, JsonSchema, ToolSchema, check_tools, settled

P = ParamSpec("P")
Tools = Mapping[str, JsonSchema]
"""The JSON Schema of each tool's arguments, by the tool's name."""
FENCES = ("```", "~~~")
_NEAR = 16
"""Marks that are looked at one by one; a tag that is not among them is looked up."""


class CallStatus(StrEnum):
    """Whether a tool call is well formed."""

    OK = "ok"
    LENIENT = "lenient"  # undocumented form with exactly one reading; executed if `tool_calls` is "lenient"
    MALFORMED = "malformed"  # would need a repair; never executed
    TRUNCATED = "truncated"  # the engine stopped for length inside it
    SUSPECT = "suspect"  # text that looks like a call: a spelled tag, or a tool's name in call form; never executed

    @property
    def runs(self) -> bool:
        """Whether such a call is executed."""
        return self in (CallStatus.OK, CallStatus.LENIENT)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call, exactly as sampled (law 9).

    Attributes:
        status: See `CallStatus`.
        name: The tool's name; None if it is not certain.
        arguments: The decoded arguments of a call that runs, else None.
        raw: The call's text as sampled, including tags.
        start: First token of the call, including tags, as an offset in the completion.
        stop: One past its last token.
        reason: Why the status is not "ok", as a sentence; else what of the tool's schema was translated or not checked.
            The policy reads the reason of a malformed call.
        id: The call's id as sampled, in formats in which the policy writes one (Kimi); else None.
        arguments_text: The arguments as sampled, of a call that runs in a format that writes them as JSON; else None.
    """

    status: CallStatus
    name: str | None
    arguments: Mapping[str, Any] | None
    raw: str
    start: int
    stop: int
    reason: str = ""
    id: str | None = None
    arguments_text: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A whole completion, parsed.

    Attributes:
        reasoning: Text of the reasoning, without its markup; several blocks are joined by a newline.
        text: The rest, without reasoning and calls, in order.
        calls: Tool calls, in order.
        reasoning_closed: False if the completion ended inside a reasoning block.
        late_reasoning: The last part of `reasoning`, if it came after text; it is a separate block of the message.
        suspects: Parts of `text`, or of reasoning that was never closed, that look like calls; only recorded.
        unclosed: The tags that close what a truncated completion left open in a call, innermost first.
    """

    reasoning: str
    text: str
    calls: tuple[ParsedCall, ...]
    reasoning_closed: bool = True
    late_reasoning: str = ""
    suspects: tuple[ParsedCall, ...] = ()
    unclosed: tuple[str, ...] = ()

    @property
    def records(self) -> tuple[ParsedCall, ...]:
        """The calls and the suspects, in order."""
        return (
            tuple(sorted((*self.calls, *self.suspects), key=lambda call: call.start)) if self.suspects else self.calls
        )

    @property
    def early_reasoning(self) -> str:
        """The reasoning before any text."""
        late = self.late_reasoning
        return self.reasoning.removesuffix(late).removesuffix("\n") if late else self.reasoning


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
        self.tools = check_tools(tools)
        self.lenient = lenient
        self.in_python = in_python
        self.calls: list[ParsedCall] = []
        self.uncertain = False
        self.markup = markup
        self._marks = markup.marks(decoded)
        self._starts = [mark.start for mark in self._marks]
        self._open: list[bool] | None = None  # by mark
        self._places: dict[str, list[int]] | None = None  # of each tag among the marks, for tags that are far away
        self._controls: list[int] | None = None  # the first character of each control token

    def next_mark(self, char: int, tags: Set[str] | None = None) -> Mark | None:
        """Return the first mark at or after a character; with `tags`, the first of those tags."""
        first = bisect_left(self._starts, char)
        near = first + _NEAR
        for mark in self._marks[first:near]:
            if tags is None or mark.tag in tags:
                return mark
        if near >= len(self._marks):
            return None
        if self._places is None:
            self._places = {}
            for i, mark in enumerate(self._marks):
                self._places.setdefault(mark.tag, []).append(i)
        lists = [self._places[tag] for tag in tags or () if tag in self._places]
        found = [places[at] for places in lists if (at := bisect_left(places, near)) < len(places)]
        return self._marks[min(found)] if found else None

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

    def content(self, start: int, stop: int, name: str | None = None) -> str:
        """Return the characters `start` to `stop`, which hold a name, a value or arguments of the tool `name`.

        Raises:
            Malformed: A control token is in them (law 9). Text that spells one is content.
        """
        if self._controls is None:
            ids = self.decoded.ids
            self._controls = list(compress(self.decoded.starts, map(self.markup.controls.__contains__, ids)))
        at = bisect_left(self._controls, start)
        if at < len(self._controls) and (first := self._controls[at]) < stop:
            token = self.decoded.ids[self.decoded.token_of(first)]
            raise Malformed(f"The control token {self.markup.decode([token])[0]} is inside the call's content.", name)
        return self.text[start:stop]

    def unclosed(self, start: int, pairs: Mapping[str, str]) -> tuple[str, ...]:
        """Return the tags that close what is open at the end of calls that begin at a character, innermost first.

        A name follows a tag that ends in "<" or "/" (MiniMax M3's); the tag counts once the name is whole.
        """
        opened: list[Mark] = []
        for mark in self._marks[bisect_left(self._starts, start) :]:
            if mark.tag.endswith(("<", "/")) and ">" not in self.text[mark.stop :]:
                continue
            closed = next((i for i in reversed(range(len(opened))) if pairs[opened[i].tag] == mark.tag), None)
            if closed is not None:
                del opened[closed:]
            elif mark.tag in pairs:
                opened.append(mark)
        closers = ((pairs[mark.tag], self.text[mark.stop :].partition(">")[0]) for mark in reversed(opened))
        return tuple(f"{close}{name}>" if close.endswith("/") else close for close, name in closers)

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
        schema = self.tools.compiled.get(call.name)
        note = call.loose or (schema.notes if schema is not None else "")
        self._add(start, stop, status, call.name, fit.arguments, note, call.id, call.text)

    def _fit(self, call: ParsedCallText) -> Fit:
        schema = self.tools.compiled.get(call.name)
        if schema is None:
            return Fit(settled(call.arguments, {(): -1}, {}))  # plain text stays text
        return schema.fit(call.arguments)

    def mark_loose(self, first: int, reason: str) -> None:
        """Mark the valid calls from index `first` on as loose."""
        for i, call in enumerate(self.calls[first:], first):
            if not call.status.runs:
                continue
            if self.lenient:
                why = reason if call.status == CallStatus.OK else call.reason
                self.calls[i] = replace(call, status=CallStatus.LENIENT, reason=why)
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


class Cursor:
    """Takes the body of a call piece by piece. A method that finds something else than expected raises `Malformed`.

    "Take" means: return (or skip) the text and move past it.

    Attributes:
        name: The tool's name, once it is certain; errors carry it.
        taken: The tag that was taken last.
        loose: The first difference from the family's documentation; see `ParsedCallText.loose`.
    """

    def __init__(self, completion: Completion, start: int, stop: int) -> None:
        self._completion = completion
        self._at = start
        self._stop = stop
        self.name: str | None = None
        self.taken: str | None = None
        self.loose = ""

    @property
    def tools(self) -> Tools:
        """JSON Schemas of the arguments, by tool name."""
        return self._completion.tools

    def reading(self, text: str, in_python: bool = False) -> Choice:
        """Return what a value written as plain text may be; see `call_values.reading`.

        `in_python`: the family writes lists and objects as Python does. The chat template may show it, too.
        """
        return reading(text, lambda: in_python or self._completion.in_python())

    @property
    def schema(self) -> ToolSchema | None:
        """The schema of the called tool; None if the tool is unknown."""
        return None if self.name is None else self._completion.tools.compiled.get(self.name)

    def follows(self, text: str) -> bool:
        """Return whether `text`, which has no tag, comes next."""
        mark = self._next()
        return self._completion.text.startswith(text, self._at, self._stop if mark is None else mark.start)

    def error(self, reason: str) -> Malformed:
        """Return the error for a reason, to be raised."""
        return Malformed(reason, self.name)

    def mark_loose(self, reason: str) -> None:
        """Record that the call is loose; an empty reason records nothing."""
        self.loose = self.loose or reason

    def take_rest(self) -> str:
        """Take everything that is left, including text that spells tags.

        Raises:
            Malformed: A control token is left.
        """
        text = self._completion.content(self._at, self._stop, self.name)
        self._at = self._stop
        return text

    def peek(self) -> str | None:
        """Return the next tag, without taking it; None if no tag is left."""
        mark = self._next()
        return None if mark is None else mark.tag

    def until_tag(self, *tags: str) -> str:
        """Take and return the text before the next tag, and take the tag, which must be one of `tags`.

        Raises:
            Malformed: The next tag is another one, or no tag is left.
        """
        start, mark = self._at, self._take_tag(*tags)
        return self._completion.content(start, mark.start, self.name)

    def _take_tag(self, *tags: str) -> Mark:
        mark = self._next()
        expected = " or ".join(tags)
        if mark is None:
            raise self.error(f"The call lacks {expected}.")
        if mark.tag not in tags:
            raise self.error(f"The call has {mark.tag} where {expected} belongs.")
        self._at, self.taken = mark.stop, mark.tag
        return mark

    def until_text(self, text: str) -> str:
        """Take and return what comes before `text`, and take `text`, which is not a tag.

        Raises:
            Malformed: `text` does not come before the next tag.
        """
        mark = self._next()
        end = self._stop if mark is None else mark.start
        found = self._completion.text.find(text, self._at, end)
        if found < 0:
            before = self._completion.text[max(0, self._at - 20) : self._at]
            raise self.error(f"The call lacks {text!r} after {before!r}.")
        taken = self._completion.content(self._at, found, self.name)
        self._at = found + len(text)
        return taken

    def peek_here(self) -> str | None:
        """Return the tag at this character, without taking it; None if there is none."""
        mark = self._next()
        return mark.tag if mark is not None and mark.start == self._at else None

    def skip_blank(self) -> bool:
        """Take the blanks at this character; return whether there are any."""
        begin = self._at
        while self._at < self._stop and self._completion.text[self._at].isspace():
            self._at += 1
        return self._at > begin

    def skip(self, text: str) -> bool:
        """Take `text`, which is not a tag, if it comes next; return whether it does."""
        here = self._completion.text.startswith(text, self._at, self._stop) and self.peek_here() is None
        self._at += len(text) if here else 0
        return here

    def expect(self, text: str) -> None:
        """Take `text`, which is not a tag and must come next.

        Raises:
            Malformed: Something else comes next.
        """
        if not self.skip(text):
            raise self._unexpected(repr(text))

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        """Take and return what a pattern matches here, before the next tag; `what` names it in the error.

        Raises:
            Malformed: The pattern does not match.
        """
        mark = self._next()
        found = pattern.match(self._completion.text, self._at, self._stop if mark is None else mark.start)
        if not found:
            raise self._unexpected(what)
        self._at = found.end()
        return self._completion.content(found.start(), self._at, self.name)

    def _unexpected(self, expected: str) -> Malformed:
        found = self._completion.text[self._at : min(self._stop, self._at + 20)]
        return self.error(f"The call {f'has {shortened(found)}' if found else 'ends'} where {expected} belongs.")

    def tag(self, *tags: str) -> None:
        """Take the next tag, which must be one of `tags`, with only blanks before it."""
        start, mark = self._at, self._take_tag(*tags)
        self.expect_blank(self._completion.text[start : mark.start])

    def expect_end(self) -> None:
        """Take the rest, which must be blank."""
        self.expect_blank(self._completion.text[self._at : self._stop])

    def expect_blank(self, text: str) -> None:
        """Check that a text is blank."""
        if text.strip():
            raise self.error(f"The call has stray text: {shortened(text)}.")

    def tool_name(self, name: str) -> str:
        """Check a tool's name, and keep it for later errors."""
        if not is_valid_name(name):
            raise self.error(f"The call has no valid tool name: {name[:60]!r}.")
        self.name = name
        return name

    def _next(self) -> Mark | None:
        mark = self._completion.next_mark(self._at)
        return mark if mark is not None and mark.stop <= self._stop else None
