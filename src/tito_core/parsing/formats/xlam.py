"""Calls of xLAM: a message that is a JSON array of calls and nothing else.

An array whose first element does not begin with a "name" is an answer, not a call. Loose: an array in a fenced block
that is the message, or after another family's tag, as vLLM reads it too (0.32, `tool_parsers/xlam_tool_parser.py`).
"""

from __future__ import annotations

import re

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.formats.granite import forced_array
from tito_core.parsing.formats.json_array import read_array
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

OPEN, CLOSE, OTHER = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
_BEGINS = re.compile(r'\s*\[\s*\{\s*"name"\s*:')
_FENCE, _END_FENCE = re.compile(r"```(?:json)?\s"), re.compile(r"\s*```")


class XlamCalls(CallFormat):
    """One array."""

    tags = (OPEN, CLOSE, OTHER)
    bare = "[`"
    opening = frozenset({OPEN, OTHER})

    def read(self, said: Completion, opened: int, tag: str) -> int | None:
        """Read an array after another family's tag."""
        start = opened + len(tag)
        if not _BEGINS.match(said.text, start):
            return None
        first, end = len(said.calls), read_array(said, opened, start, alone=False)
        if tag == OPEN and end < len(said.text):
            close = said.next(end)
            if close is None or close.tag != CLOSE or said.text[end : close.start].strip():
                said.malformed(opened, end, f"The calls have no closing {CLOSE} tag.")
                del said.calls[first:-1]
            else:
                end = close.stop
        said.loosen(first, f"The calls stand after {tag}, where the array belongs alone.")
        return end

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the array, where the message begins as one of calls does, in a fenced block or alone."""
        fence = _FENCE.match(said.text, start)
        body = start if fence is None else fence.end()
        if not _BEGINS.match(said.text, body):
            return None
        if fence is None:
            read_array(said, start, body, alone=True)
            return len(said.text)
        first, end = len(said.calls), read_array(said, start, body, alone=False)
        closed = _END_FENCE.match(said.text, end)
        if end < len(said.text) and (closed is None or said.text[closed.end() :].strip()):
            del said.calls[first:]
            said.malformed(start, len(said.text), "The block of calls does not end the message.")
        said.loosen(first, "The calls stand in a fenced block, where the array belongs alone.")
        return len(said.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        return forced_array(tools)


register_format("xlam", XlamCalls())
