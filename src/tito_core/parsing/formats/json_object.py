"""Calls as one JSON object each: Hermes in a pair of tags, Llama 3 and 4 without tags around each.

Hermes (Qwen2.5, Qwen3, Granite 4, Ling 2.6, LongCat-Flash, ERNIE 4.5, and the tool template of `smollm2`):
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with any number of `<think>...</think>` blocks between.
Loose: an additional key "id" or "type", or no closing tag at the end of the completion. vLLM 0.32 and SGLang 0.5.23
read both.

Llama 3: the message is `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`; several calls are separated
by `;`. Sources: the Llama 3.1 template (in TRL 1.16), which renders "parameters" and only one call; vLLM 0.32,
`tool_parsers/llama_tool_parser.py`, which also reads "arguments". Meta's descriptions put `"type": "function"` first.
An object that begins otherwise is an answer, not a call. Loose: calls separated by the tag or by blanks, which vLLM and
SGLang read.

Llama 4's template (in transformers) asks for the same JSON, and writes the text of the message between
`<|python_start|>` and `<|python_end|>`, and then the objects, one after another. Loose: the objects between these tags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import (
    Malformed,
    ParsedCallText,
    after_blank,
    call_of_object,
    json_end,
    json_value,
    shortened,
)
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.turn import LONGCAT_THINK

_HERMES_EXTRA = frozenset({"id", "type"})
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
SEPARATOR = ";"
_BEGINS = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function"\s*,)')
_BEGINNINGS = ('{"name":', '{"type":"function",')
_LLAMA_EXTRA = frozenset({"type"})


class HermesCalls(CallFormat):
    """One JSON object per call.

    Attributes:
        open: Opens a call.
        close: Closes it.
    """

    def __init__(self, open: str = "<tool_call>", close: str = "</tool_call>", wrappers: Sequence[str] = ()) -> None:
        self.open, self.close = open, close
        self.tags, self.opening, self.wrappers = (open, close), frozenset({open}), wrappers
        self.pairs = {open: close}

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call."""
        body = start + len(self.open)
        # If the closing tag is not a token, a JSON string may spell it, so search for it after the JSON value.
        search = json_end(completion.text, body) if completion.markup.token_of(self.close) is None else body
        frame = completion.frame(start, body, self.close, self.opening, search)
        return completion.read_frame(frame, self.close, self._call, self_delimiting=True)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of one call."""
        begin, end = g.tag(markup, self.open), g.tag(markup, self.close)
        return g.sequence(begin, g.json_calls(tools, before="\n", after="\n"), end)

    @staticmethod
    def _call(cursor: Cursor) -> ParsedCallText:
        text = cursor.take_rest()
        return call_of_object(json_value(text), text, loosely=_HERMES_EXTRA)


class Llama3Calls(CallFormat):
    """Objects up to the end of the message."""

    tags: Sequence[str] = (PYTHON_TAG,)
    bare = "{"
    opening = frozenset({PYTHON_TAG})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the calls after the tag."""
        return _read_objects(completion, start, start + len(tag))

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the calls, if the message begins like one."""
        return _read_objects(completion, start, start) if _BEGINS.match(completion.text, start) else None

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
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
                return _read_objects(completion, start, body, separators=("", SEPARATOR))
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
        _read_objects(completion, start, body, separators=("", SEPARATOR), stop=end.start)
        completion.mark_loose(first, f"The call belongs after {PYTHON_END}, not before it.")
        return end.stop

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the calls, if the message begins like one."""
        begins = self._begins(completion, start)
        return _read_objects(completion, start, start, separators=("", SEPARATOR)) if begins else None

    def _begins(self, completion: Completion, char: int) -> bool:
        return _BEGINS.match(completion.text, after_blank(completion.text, char)) is not None


def _read_objects(
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
        completion.add_parsed(start, end, _read_call, completion, body, end)
        if after == total:
            break
        loosely = loosely or separator not in separators
        start = body = after + len(separator)
    if loosely:
        completion.mark_loose(first, f"Calls must be separated by {SEPARATOR!r}.")
    return total


def _read_call(completion: Completion, body: int, end: int) -> ParsedCallText:
    return _call_of_text(completion.content(body, end))


def _call_of_text(text: str) -> ParsedCallText:
    value = json_value(text)
    key = (
        "arguments" if isinstance(value, dict) and "parameters" not in value and "arguments" in value else "parameters"
    )
    return call_of_object(value, text, key, allowed=_LLAMA_EXTRA)


def _broken(completion: Completion, start: int, body: int) -> None:
    try:
        _call_of_text(completion.text[body:])
    except Malformed as fault:
        completion.add_unclosed(start, len(completion.text), fault.reason)


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


register_format(
    "hermes",
    HermesCalls(),
    "qwen",
    "qwen25",
    "qwen3_json",
    "granite4",
    "trinity",
    marks=Marks(("<tool_call>", '{"name": ', '"arguments": '), ("<function=", "<arg_key>", "<|tool_call>")),
)
register_format("ernie45", HermesCalls(wrappers=("<response>", "</response>")))
register_format(
    "longcat",
    HermesCalls("<longcat_tool_call>", "</longcat_tool_call>"),
    reasoning=LONGCAT_THINK,
    marks=Marks(("<longcat_tool_call>", '"arguments": '), ("<longcat_arg_key>",)),
)
_ASKS = '{"name": function name, "parameters": dictionary'
register_format("llama3_json", Llama3Calls(), "llama3", reasoning=None, marks=Marks((_ASKS,), ("<|python_start|>",)))
register_format("llama4_json", Llama4Calls(), reasoning=None, marks=Marks((_ASKS, "<|python_start|>")))
