"""Calls of Kimi K2: a section of calls, each with an id that contains the name, and JSON arguments.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "x"}
    <|tool_call_end|><|tool_calls_section_end|>

The template repeats the id in the tool's result, so the id is kept as sampled. Sources: vLLM 0.32, `parser/kimi_k2.py`;
SGLang 0.5.23, `function_call/kimik2_detector.py`, which guesses the name for an id that is only a number; here such a
call is malformed. Loose: an id without `functions.`, which both engines read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import ParsedCallText, call_of_arguments, json_value, shortened
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.schema import kinds_of
from tito_core.parsing.turn import ReasoningTags


@dataclass(frozen=True, slots=True)
class Section:
    """The four tags of a section.

    Attributes:
        open: Opens the section.
        close: Closes the section.
        call: Opens a call in it.
        end_call: Closes a call.
        inner: Tags inside a call; one after a call shows that the call was closed before its arguments.
    """

    open: str
    close: str
    call: str
    end_call: str
    inner: Set[str] = frozenset()

    def read(self, completion: Completion, start: int, body: Callable[[Cursor], ParsedCallText]) -> int:
        """Read the section at character `start`; `body` parses each call. Return the character after the section."""
        first, at = len(completion.calls), start + len(self.open)
        inside = {self.open, self.close, self.call}
        while True:
            mark = completion.next_mark(at, inside)
            stop = len(completion.text) if mark is None else mark.start
            if mark is not None and mark.tag == self.close:
                self._stray(completion, at, stop)
                if len(completion.calls) == first:
                    completion.add_malformed(start, mark.stop, "The section has no calls.")
                return mark.stop
            if mark is None or mark.tag == self.open:
                self._unclosed(completion, first, start, at, stop)
                return stop
            self._stray(completion, at, stop)
            frame = completion.frame(mark.start, mark.stop, self.end_call, frozenset(inside))
            following = completion.next_mark(frame.stop)
            if frame.closed and following is not None and following.tag in self.inner:
                reason = f"The call has {following.tag} after its closing {self.end_call}."
                completion.add_malformed(frame.start, frame.stop, reason)
                at = frame.stop
            else:
                at = completion.read_frame(frame, self.end_call, body)

    def _stray(self, completion: Completion, start: int, stop: int) -> None:
        text = completion.text[start:stop]
        if text.strip():
            completion.add_malformed(start, stop, f"There is stray text among the calls: {shortened(text)}.")

    def _unclosed(self, completion: Completion, first: int, start: int, at: int, stop: int) -> None:
        """Add the end of a section that was not closed.

        If the completion ends after whole calls, they are loose, or sound where the token limit cut the section off.
        """
        reason = f"The section of calls has no closing {self.close} tag."
        if completion.truncated and stop == len(completion.text):
            if completion.text[at:stop].strip() or len(completion.calls) == first:
                completion.add_unclosed(at if len(completion.calls) > first else start, stop, reason)
            return
        if len(completion.calls) == first:
            completion.add_malformed(start, stop, reason)
            return
        self._stray(completion, at, stop)
        if stop == len(completion.text) and all(call.status.runs for call in completion.calls[first:]):
            completion.mark_loose(first, reason)
            return
        for i in range(first, len(completion.calls)):
            completion.mark_malformed(i, reason)


SECTION = Section(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)
ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"functions\.(.+):[0-9]+|([\w-]+):[0-9]+")


class KimiCalls(CallFormat):
    """A section of calls with ids."""

    tags = (SECTION.open, SECTION.close, SECTION.call, SECTION.end_call, ARGUMENTS)
    opening = frozenset({SECTION.open})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return SECTION.read(completion, start, _call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        number, arguments = {"type": "regex", "pattern": "[0-9]+"}, g.tag(markup, ARGUMENTS)
        calls = (
            g.sequence(g.text(f"functions.{name}:"), number, arguments, g.arguments_json(schema))
            for name, schema in tools.items()
        )
        begin = [g.tag(markup, tag) for tag in (SECTION.open, SECTION.call)]
        end = [g.tag(markup, tag) for tag in (SECTION.end_call, SECTION.close)]
        return g.sequence(*begin, g.either(calls), *end)


def _call(cursor: Cursor) -> ParsedCallText:
    written = cursor.until_tag(ARGUMENTS).strip()
    match = _ID.fullmatch(written)
    wrong = f"The call's id must be functions.NAME:NUMBER, not {written[:60]!r}."
    if match is None:
        raise cursor.error(wrong)
    call = call_of_arguments(cursor.tool_name(match[1] or match[2]), cursor.take_rest(), written)
    return call if match[1] else replace(call, loose=wrong)


register_format("kimi_k2", KimiCalls(), marks=Marks(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")))


ANCHORS = (OPEN, CLOSE, SEPARATOR) = ("<|open|>", "<|close|>", "<|sep|>")
K3_SECTION = Section(f"{OPEN}tools{SEPARATOR}", f"{CLOSE}tools{SEPARATOR}", f"{OPEN}call ", f"{CLOSE}call{SEPARATOR}")
ARGUMENT, END_ARGUMENT = f"{OPEN}argument ", f"{CLOSE}argument{SEPARATOR}"
_CALL = re.compile(r'tool="([^"<>\n]+)" index="[0-9]+"')
_ARGUMENT = re.compile(r'key="([^"\n]+)" type="(string|number|integer|boolean|null|object|array)"')


class KimiK3Calls(CallFormat):
    """A channel of calls."""

    tags = (K3_SECTION.open, K3_SECTION.close, K3_SECTION.call, K3_SECTION.end_call, ARGUMENT, END_ARGUMENT, *ANCHORS)
    anchors = ANCHORS
    opening = frozenset({K3_SECTION.open})
    wrappers = (
        f"{OPEN}response{SEPARATOR}",
        f"{CLOSE}response{SEPARATOR}",
        f"{CLOSE}message{SEPARATOR}",
    )

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one channel of calls."""
        return K3_SECTION.read(completion, start, _k3_call)


def _k3_call(cursor: Cursor) -> ParsedCallText:
    head = _CALL.fullmatch(written := cursor.until_tag(SEPARATOR).strip())
    if head is None and (head := _CALL.fullmatch(" ".join(written.split()))):
        cursor.mark_loose(f"The call has more than one blank between its attributes: {written[:60]!r}.")
    if head is None:
        raise cursor.error(f'The call must have tool="..." and index="...", not {written[:60]!r}.')
    name = cursor.tool_name(_plain(head[1]))
    arguments: dict[str, Any] = {}
    while cursor.peek() == ARGUMENT:
        cursor.tag(ARGUMENT)
        match = _ARGUMENT.fullmatch(written := cursor.until_tag(SEPARATOR).strip())
        if match is None:
            raise cursor.error(f'An argument must have key="..." and type="...", not {written[:60]!r}.')
        key, value = _plain(match[1]), cursor.until_tag(END_ARGUMENT)
        if key in arguments:
            raise cursor.error(f"The argument {key!r} appears twice.")
        arguments[key] = value if match[2] == "string" else json_value(value, f"value of {key!r}", name)
        if match[2] not in kinds_of(arguments[key]):
            raise cursor.error(f"The value of {key!r} is not of its type {match[2]}.")
    cursor.expect_end()
    return ParsedCallText(name, arguments, loose=cursor.loose)


def _plain(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


register_format(
    "kimi_k3",
    KimiK3Calls(),
    reasoning=ReasoningTags(f"{OPEN}think{SEPARATOR}", f"{CLOSE}think{SEPARATOR}"),
    marks=Marks((K3_SECTION.open, ARGUMENT)),
)
