"""Calls of Llama 3: a message that is `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`.

Several calls are separated by `;`. Sources: the Llama 3.1 template (in TRL 1.16), which renders "parameters" and only
one call; vLLM 0.32, `tool_parsers/llama_tool_parser.py`, which also reads "arguments". Meta's descriptions
put `"type": "function"` first. An object that begins otherwise is an answer, not a call. Loose: calls separated by the
tag or by blanks, which vLLM and SGLang read.

Llama 4's template (in transformers) asks for the same JSON, and writes the text of the message between
`<|python_start|>` and `<|python_end|>`, and then the objects, one after another. Loose: the objects between these tags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import Malformed, ParsedCallText, shortened
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.detection import Marks
from tito_core.parsing.json_call import after_blank, call_of_object, json_end, json_value
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
SEPARATOR = ";"
_BEGINS = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function"\s*,)')
_BEGINNINGS = ('{"name":', '{"type":"function",')
_TYPE = frozenset({"type"})


class Llama3Calls(CallFormat):
    """Objects up to the end of the message."""

    tags: Sequence[str] = (PYTHON_TAG,)
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


class Llama4Calls(Llama3Calls):
    """Objects up to the end of the message, after a text between tags or alone."""

    tags = (PYTHON_START, PYTHON_END)
    opening = frozenset(tags)

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the calls between or after the tags; a tag around text before calls is left out."""
        body, total = start + len(tag), len(completion.text)
        if tag == PYTHON_END:
            if self._begins(completion, body):
                return _objects(completion, start, body, separators=("", SEPARATOR))
            completion.add_malformed(start, body, f"No call follows {PYTHON_END}.")
            return body
        end = completion.next_mark(body)
        if end is None or end.tag != PYTHON_END:
            stop = total if end is None else end.start
            completion.add_unclosed(start, stop, f"There is no {PYTHON_END} after {PYTHON_START}.")
            return stop
        if self._begins(completion, end.stop):
            return body
        if not self._begins(completion, body):
            reason = f"The text between {PYTHON_START} and {PYTHON_END} is not a call."
            completion.add_malformed(start, end.stop, reason)
            return end.stop
        first = len(completion.calls)
        _objects(completion, start, body, separators=("", SEPARATOR), stop=end.start)
        completion.mark_loose(first, f"The call belongs after {PYTHON_END}, not before it.")
        return end.stop

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the calls, if the message begins like one."""
        begins = self._begins(completion, start)
        return _objects(completion, start, start, separators=("", SEPARATOR)) if begins else None

    def _begins(self, completion: Completion, char: int) -> bool:
        return _BEGINS.match(completion.text, after_blank(completion.text, char)) is not None


def _objects(
    completion: Completion,
    start: int,
    body: int,
    separators: Sequence[str] = (SEPARATOR,),
    stop: int | None = None,
) -> int:
    """Read objects up to the character `stop`, by default the end; loose without `separators` between them."""
    text, total = completion.text, len(completion.text) if stop is None else stop
    first, loosely = len(completion.calls), False
    while True:
        end = json_end(text, body)
        if end == body:
            _broken(completion, start, body)
            break
        after = after_blank(text, end)
        separator = SEPARATOR if after == total else _separator(completion, after, total)
        if separator is None:
            completion.add_malformed(start, total, f"Stray text follows the call: {shortened(text[after:total])}.")
            break
        completion.add_parsed(start, end, _call, text[body:end])
        if after == total:
            break
        loosely = loosely or separator not in separators
        start = body = after + len(separator)
    if loosely:
        completion.mark_loose(first, f"Calls must be separated by {SEPARATOR!r}.")
    return total


def _separator(completion: Completion, char: int, total: int) -> str | None:
    """Return what is between two calls: ";", or loosely the tag or nothing; None if other text is there."""
    if completion.text.startswith(SEPARATOR, char):
        return SEPARATOR
    mark = completion.next_mark(char)
    if mark is not None and mark.start == char < total:
        return mark.tag if mark.tag == PYTHON_TAG else None
    return "" if _BEGINS.match(completion.text, char) or _is_cut(completion.text, char, total) else None


def _is_cut(text: str, char: int, total: int) -> bool:
    """Return whether the completion ends in what `_BEGINS` matches."""
    rest = "".join(text[char : char + 100].split())
    return total == len(text) and any(beginning.startswith(rest) for beginning in _BEGINNINGS)


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


_ASKS = '{"name": function name, "parameters": dictionary'
register_format("llama3_json", Llama3Calls(), "llama3", reasoning=None, marks=Marks((_ASKS,), ("<|python_start|>",)))
register_format("llama4_json", Llama4Calls(), reasoning=None, marks=Marks((_ASKS, "<|python_start|>")))
