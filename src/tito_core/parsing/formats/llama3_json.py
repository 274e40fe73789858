"""Calls of Llama 3: a message that is `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`.

Several calls are separated by `;`. Sources: the Llama 3.1 template (in TRL 1.16), which renders "parameters" and only
one call; vLLM 0.32, `tool_parsers/llama_tool_parser.py`, which also reads "arguments". Meta's descriptions
put `"type": "function"` first. An object that begins otherwise is an answer, not a call. Loose: calls separated by the
tag or by blanks, which vLLM and SGLang read.
"""

from __future__ import annotations

import re

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import Malformed, ParsedCallText, shortened
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.detection import Marks
from tito_core.parsing.json_call import after_blank, call_of_object, json_end, json_value
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

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the calls after the tag."""
        return _objects(completion, start, start + len(tag))

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the calls, if the message begins like one."""
        return _objects(completion, start, start) if _BEGINS.match(completion.text, start) else None

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        return g.json_calls(tools, arguments="parameters")


def _objects(completion: Completion, start: int, body: int) -> int:
    text, total = completion.text, len(completion.text)
    first, loosely = len(completion.calls), False
    while True:
        end = json_end(text, body)
        if end == body:
            _broken(completion, start, body)
            break
        after = after_blank(text, end)
        separator = SEPARATOR if after == total else _separator(completion, after)
        if separator is None:
            completion.add_malformed(start, total, f"Stray text follows the call: {shortened(text[after:])}.")
            break
        completion.add_parsed(start, end, _call, text[body:end])
        if after == total:
            break
        loosely = loosely or separator != SEPARATOR
        start = body = after + len(separator)
    if loosely:
        completion.mark_loose(first, f"Calls must be separated by {SEPARATOR!r}.")
    return total


def _separator(completion: Completion, char: int) -> str | None:
    """Return what is between two calls: ";", or loosely the tag or nothing; None if other text is there."""
    if completion.text.startswith(SEPARATOR, char):
        return SEPARATOR
    mark = completion.next_mark(char)
    if mark is not None and mark.start == char:
        return PYTHON_TAG
    return "" if _BEGINS.match(completion.text, char) else None


def _call(text: str) -> ParsedCallText:
    value = json_value(text)
    key = (
        "arguments" if isinstance(value, dict) and "parameters" not in value and "arguments" in value else "parameters"
    )
    return call_of_object(value, text, key, allowed=_TYPE)


def _broken(completion: Completion, start: int, body: int) -> None:
    try:
        _call(completion.text[body:])
    except Malformed as fault:
        completion.add_unclosed(start, len(completion.text), fault.reason)


register_format(
    "llama3_json",
    Llama3Calls(),
    "llama3",
    "llama4_json",
    reasoning=None,
    marks=Marks(('{"name": function name, "parameters": dictionary',), ("<|python_start|>",)),
)
