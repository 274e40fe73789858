"""Calls as the elements of one JSON array: Granite 3, Phi-4-mini and xLAM; others read their arrays here, too.

- Granite: `<|tool_call|>` and the array, whose `]` ends the calls; text may follow. Granite 3.1 spells `<tool_call>`.
  There is no reasoning. Source: vLLM 0.32, `parser/granite.py`.
- Phi-4-mini: a message that is `functools[{"name": ..., "arguments": {...}}]` and nothing else. Source: vLLM 0.32,
  `tool_parsers/phi4mini_tool_parser.py`, which cuts the array at the first `]` wherever it stands.
- xLAM: a message that is the array and nothing else; one whose first element does not begin with a "name" is an answer.
  Loose: an array in a fenced block that is the message, or after another family's tag, as vLLM reads it too (0.32,
  `tool_parsers/xlam_tool_parser.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import Malformed, ParsedCallText, shortened
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.json_call import after_blank, json_end, json_value, said_object
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

GRANITE_OPEN, GRANITE_OLD_OPEN = "<tool_call>", "<|tool_call|>"
XLAM_OPEN, XLAM_CLOSE, XLAM_OTHER = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
_FENCE, _END_FENCE = re.compile(r"```(?:json)?\s"), re.compile(r"\s*```")


class GraniteCalls(CallFormat):
    """An array after a tag."""

    tags = (GRANITE_OPEN, GRANITE_OLD_OPEN)
    opening = frozenset(tags)

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read the array after the tag."""
        return read_array(said, opened, opened + len(tag), alone=False)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call, with the tag that the vocabulary has as a token."""
        tag = GRANITE_OPEN if markup.token_of(GRANITE_OLD_OPEN) is None else GRANITE_OLD_OPEN
        return g.sequence(g.tag(markup, tag), forced_array(tools))


class BareArray(CallFormat):
    """A message that is an array after a word, or after none.

    Args:
        word: The word.
        begins: What the array begins with where it holds calls, as a regular expression.
    """

    def __init__(self, word: str, begins: str) -> None:
        self.bare = (word or "[")[0]
        self._word = word
        self._begins = re.compile(re.escape(word) + begins)

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the array, where the message begins as one of calls does."""
        if not self._begins.match(said.text, start):
            return None
        read_array(said, start, start + len(self._word), alone=True)
        return len(said.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        return g.sequence(g.text(self._word), forced_array(tools)) if self._word else forced_array(tools)


class XlamCalls(BareArray):
    """An array alone, in a fenced block, or after another family's tag."""

    tags = (XLAM_OPEN, XLAM_CLOSE, XLAM_OTHER)
    opening = frozenset({XLAM_OPEN, XLAM_OTHER})

    def __init__(self) -> None:
        super().__init__("", r'\s*\[\s*\{\s*"name"\s*:')
        self.bare = "[`"

    def read(self, said: Completion, opened: int, tag: str) -> int | None:
        """Read an array after another family's tag."""
        start = opened + len(tag)
        if not self._begins.match(said.text, start):
            return None
        first, end = len(said.calls), read_array(said, opened, start, alone=False)
        if tag == XLAM_OPEN and end < len(said.text):
            close = said.next(end)
            if close is None or close.tag != XLAM_CLOSE or said.text[end : close.start].strip():
                said.malformed(opened, end, f"The calls have no closing {XLAM_CLOSE} tag.")
                del said.calls[first:-1]
            else:
                end = close.stop
        said.loosen(first, f"The calls stand after {tag}, where the array belongs alone.")
        return end

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the array, where the message begins as one of calls does, in a fenced block or alone."""
        fence = _FENCE.match(said.text, start)
        body = start if fence is None else fence.end()
        if fence is None:
            return super().read_bare(said, start)
        if not self._begins.match(said.text, body):
            return None
        first, end = len(said.calls), read_array(said, start, body, alone=False)
        closed = _END_FENCE.match(said.text, end)
        whole = closed is not None and not said.text[closed.end() :].strip()
        if not whole and any(call.status.runs for call in said.calls[first:]):
            del said.calls[first:]
            said.unclosed(start, len(said.text), "The block of calls does not end the message.")
        said.loosen(first, "The calls stand in a fenced block, where the array belongs alone.")
        return len(said.text)


def forced_array(tools: Tools) -> g.Grammar:
    """An array of one call."""
    return g.json_calls(tools, before="[", after="]")


def read_array(
    said: Completion,
    opened: int,
    start: int,
    *,
    alone: bool,
    stop: int | None = None,
    call_id: str | None = None,
    read: Callable[[Any, str], ParsedCallText] | None = None,
) -> int:
    """Read the array at character `start` into calls.

    An array that is broken is one malformed call, from `opened` on: nothing tells where its calls begin and end.

    Args:
        said: The completion.
        opened: First character of the markup.
        start: First character of the array, or a blank before it.
        alone: Whether nothing but blanks may follow.
        stop: One past the last character of the calls, markup included; by default that of the array.
        call_id: Key under which a call may hold an id.
        read: Reads one call from its value and its text; by default `said_object`.

    Returns:
        The character after the array, or after the completion where the array is broken.
    """
    text, total = said.text, len(said.text)
    end = json_end(text, start)
    if end == start:
        _broken(said, opened, start)
        return total
    if alone and text[end:].strip():
        said.malformed(opened, total, f"Stray text follows the calls: {shortened(text[end:].strip())}.")
        return total
    last = end if stop is None else stop
    try:
        value = json_value(text[start:end])
    except Malformed as fault:
        said.malformed(opened, last, fault.reason)
        return end
    if not isinstance(value, list) or not value:
        kind = "an empty one" if value == [] else type(value).__name__
        said.malformed(opened, last, f"The calls must be a JSON array that holds some, not {kind}.")
        return end
    at, begun = after_blank(text, start) + 1, opened
    for i, element in enumerate(value):
        after = json_end(text, at)
        until = last if i == len(value) - 1 else after
        if read is None:
            said.judge(begun, until, said_object, element, text[at:after], call_id=call_id)
        else:
            said.judge(begun, until, read, element, text[at:after])
        begun = at = after_blank(text, after) + 1  # past the comma
    return end


def _broken(said: Completion, opened: int, start: int) -> None:
    try:
        json_value(said.text[start:])
    except Malformed as fault:
        said.unclosed(opened, len(said.text), fault.reason)
    else:
        raise AssertionError("A JSON value has an end.")


register_format("granite", GraniteCalls(), reasoning=None)
register_format("phi4_mini", BareArray("functools", r"\["), "phi4_mini_json", reasoning=None)
register_format("xlam", XlamCalls())
