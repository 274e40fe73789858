"""Calls of Llama 3: a message that is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or alone.

Several calls are parted by `;`. Sources: the Llama 3.1 template (in TRL 1.16), which renders "parameters" and one call
alone; vLLM 0.32, `tool_parsers/llama_tool_parser.py`, which also reads "arguments". Meta's own descriptions put
`"type": "function"` first. An object that begins in neither way is an answer, not a call.
"""

from __future__ import annotations

import re

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import Malformed, ParsedCallText, shortened
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.detection import Marks
from tito_core.parsing.json_call import after_blank, json_end, json_value, said_object
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = ";"
_BEGINS = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function"\s*,)')
_TYPE = frozenset({"type"})


class Llama3Calls(CallFormat):
    """Objects up to the end of the message."""

    tags = (PYTHON_TAG,)
    bare = "{"
    opening = frozenset({PYTHON_TAG})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read the calls after the tag."""
        return _objects(said, opened, opened + len(tag))

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the calls, where the message begins as a call does."""
        return _objects(said, start, start) if _BEGINS.match(said.text, start) else None

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        return g.json_calls(tools, arguments="parameters")


def _objects(said: Completion, opened: int, start: int) -> int:
    text, total = said.text, len(said.text)
    while True:
        end = json_end(text, start)
        if end == start:
            _broken(said, opened, start)
            return total
        after = after_blank(text, end)
        if after == total:
            said.judge(opened, end, _call, text[start:end])
            return total
        if not text.startswith(SEPARATOR, after):
            said.malformed(opened, total, f"Stray text follows the call: {shortened(text[after:])}.")
            return total
        said.judge(opened, end, _call, text[start:end])
        opened = start = after + len(SEPARATOR)


def _call(text: str) -> ParsedCallText:
    value = json_value(text)
    key = (
        "arguments" if isinstance(value, dict) and "parameters" not in value and "arguments" in value else "parameters"
    )
    return said_object(value, text, key, allowed=_TYPE)


def _broken(said: Completion, opened: int, start: int) -> None:
    try:
        _call(said.text[start:])
    except Malformed as fault:
        said.unclosed(opened, len(said.text), fault.reason)


register_format(
    "llama3_json",
    Llama3Calls(),
    "llama3",
    "llama4_json",
    reasoning=None,
    marks=Marks(('{"name": function name, "parameters": dictionary',), ("<|python_start|>",)),
)
