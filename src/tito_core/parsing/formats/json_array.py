"""Calls in one JSON array: Granite 3, Phi-4-mini and xLAM. Other formats use `read_array` too.

- Granite: `<|tool_call|>` (in Granite 3.1 `<tool_call>`) and the array; text may follow. No reasoning. Source: vLLM
  0.32, `parser/granite.py`.
- Phi-4-mini: the message is only `functools[{"name": ..., "arguments": {...}}]`. Loose: the same on a line after text.
  Source: vLLM 0.32, `tool_parsers/phi4mini_tool_parser.py`, which reads it anywhere, and cuts the array at the first
  `]`, even inside an argument.
- xLAM: the message is only the array. If its first element does not begin with a "name", it is an answer. Loose: the
  array in a fenced block that is the message, or after another family's tag, as vLLM reads them (0.32,
  `tool_parsers/xlam_tool_parser.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import Malformed, ParsedCallText, shortened
from tito_core.parsing.completion import FENCES, Completion, Tools
from tito_core.parsing.detection import Marks
from tito_core.parsing.json_call import after_blank, call_of_object, json_end, json_value
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

GRANITE_OPEN, GRANITE_OLD_OPEN = "<tool_call>", "<|tool_call|>"
XLAM_OPEN, XLAM_CLOSE, XLAM_OTHER = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
_CALLS = re.compile(r'\s*\[\s*\{\s*"name"\s*:')
_FENCE, _END_FENCE = re.compile(r"```(?:json)?\s"), re.compile(r"\s*```")


class GraniteCalls(CallFormat):
    """An array after a tag."""

    tags = (GRANITE_OPEN, GRANITE_OLD_OPEN)
    opening = frozenset(tags)

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the array after the tag."""
        return read_array(completion, start, start + len(tag), alone=False)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of an array of one call, after the tag that is a token of the vocabulary."""
        tag = GRANITE_OPEN if markup.token_of(GRANITE_OLD_OPEN) is None else GRANITE_OLD_OPEN
        return g.sequence(g.tag(markup, tag), forced_array(tools))


class Phi4Calls(CallFormat):
    """A message that is only `functools` and an array."""

    tags = ("functools[",)
    opening = frozenset(tags)

    def read(self, completion: Completion, start: int, tag: str) -> int | None:
        """Read the array; after text only if it begins a line outside a code fence, and begins like one of calls."""
        mark = completion.previous_mark(start)
        while mark is not None and mark.tag == tag:
            mark = completion.previous_mark(mark.start)
        body, before = start + len("functools"), completion.text[0 if mark is None else mark.stop : start]
        alone = not before.strip()
        if not alone:
            fenced = sum(map(before.count, FENCES)) % 2
            if fenced or not before.rstrip(" \t").endswith("\n") or not _CALLS.match(completion.text, body):
                return None
        first = len(completion.calls)
        read_array(completion, start, body, alone=True)
        if not alone:
            completion.mark_loose(first, "The calls must be the whole message.")
        return len(completion.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of an array of one call."""
        return g.sequence(g.text("functools"), forced_array(tools))


class XlamCalls(CallFormat):
    """An array: alone, in a fenced block, or after another family's tag."""

    bare = "[`"

    tags = (XLAM_OPEN, XLAM_CLOSE, XLAM_OTHER)
    opening = frozenset({XLAM_OPEN, XLAM_OTHER})

    def read(self, completion: Completion, start: int, tag: str) -> int | None:
        """Read an array after another family's tag."""
        body = start + len(tag)
        if not _CALLS.match(completion.text, body):
            return None
        first, end = len(completion.calls), read_array(completion, start, body, alone=False)
        if tag == XLAM_OPEN and end < len(completion.text):
            close = completion.next_mark(end)
            if close is None or close.tag != XLAM_CLOSE or completion.text[end : close.start].strip():
                completion.add_malformed(start, end, f"The calls have no closing {XLAM_CLOSE} tag.")
                del completion.calls[first:-1]
            else:
                end = close.stop
        completion.mark_loose(first, f"The calls follow {tag}, but the array must be the whole message.")
        return end

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the array, in a fenced block or alone, if it begins like one of calls."""
        fence = _FENCE.match(completion.text, start)
        body = start if fence is None else fence.end()
        if not _CALLS.match(completion.text, body):
            return None
        if fence is None:
            read_array(completion, start, body, alone=True)
            return len(completion.text)
        first, end = len(completion.calls), read_array(completion, start, body, alone=False)
        closed = _END_FENCE.match(completion.text, end)
        whole = closed is not None and not completion.text[closed.end() :].strip()
        if not whole and any(call.status.runs for call in completion.calls[first:]):
            del completion.calls[first:]
            completion.add_unclosed(start, len(completion.text), "The block of calls does not end the message.")
        completion.mark_loose(first, "The calls are in a fenced block, but the array must be the whole message.")
        return len(completion.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of an array of one call."""
        return forced_array(tools)


def forced_array(tools: Tools) -> g.Grammar:
    """Return the grammar of an array of one call."""
    return g.json_calls(tools, before="[", after="]")


def read_array(
    completion: Completion,
    start: int,
    body: int,
    *,
    alone: bool,
    stop: int | None = None,
    call_id: str | None = None,
    read: Callable[[Any, str], ParsedCallText] | None = None,
) -> int:
    """Read an array of calls. A broken array is one malformed call, since its calls cannot be distinguished.

    Args:
        completion: The completion.
        start: First character of the calls, tags included.
        body: First character of the array, or a blank before it.
        alone: Whether only blanks may follow.
        stop: One past the last character of the calls, tags included; by default the end of the array.
        call_id: Key of a call's id, if the format has one.
        read: Returns one call from its value and its text; by default `call_of_object`.

    Returns:
        The character after the array; after the completion if the array is broken.
    """
    text, total = completion.text, len(completion.text)
    end = json_end(text, body)
    if end == body:
        _broken(completion, start, body)
        return total
    if alone and text[end:].strip():
        completion.add_malformed(start, total, f"Stray text follows the calls: {shortened(text[end:].strip())}.")
        return total
    last = end if stop is None else stop
    try:
        value = json_value(text[body:end])
    except Malformed as fault:
        completion.add_malformed(start, last, fault.reason)
        return end
    if not isinstance(value, list) or not value:
        kind = "an empty array" if value == [] else type(value).__name__
        completion.add_malformed(start, last, f"The calls must be a JSON array of at least one call, not {kind}.")
        return end
    at, begin = after_blank(text, body) + 1, start
    for i, element in enumerate(value):
        after = json_end(text, at)
        until = last if i == len(value) - 1 else after
        if read is None:
            completion.add_parsed(begin, until, call_of_object, element, text[at:after], call_id=call_id)
        else:
            completion.add_parsed(begin, until, read, element, text[at:after])
        begin = at = after_blank(text, after) + 1  # past the comma
    return end


def _broken(completion: Completion, start: int, body: int) -> None:
    try:
        json_value(completion.text[body:])
    except Malformed as fault:
        completion.add_unclosed(start, len(completion.text), fault.reason)
    else:
        raise AssertionError("A JSON value has an end.")


register_format("granite", GraniteCalls(), reasoning=None, marks=Marks(("<|tool_call|>", "<|start_of_role|>")))
register_format("phi4_mini", Phi4Calls(), "phi4_mini_json", reasoning=None, marks=Marks(('functools[{"name":',)))
register_format("xlam", XlamCalls(), marks=Marks(('[{"name": "tool_call_name", "arguments":',), ("<tool_call>",)))
