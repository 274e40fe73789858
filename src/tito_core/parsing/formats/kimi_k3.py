"""Calls of Kimi K3: a channel of calls whose arguments give their JSON type.

    <|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" type="string"<|sep|>x
    <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>

Strings are written as they are, other values as JSON. Names and keys write `"` as `&quot;` and `&` as `&amp;`.
Reasoning and the answer are in channels of their own. `<|open|>`, `<|close|>` and `<|sep|>` are control tokens: a tag
that spells them with other tokens is text. Sources: vLLM 0.32, `tool_parsers/kimi_k3_tool_parser.py`; SGLang 0.5.23,
`function_call/kimik3_format.py`.
"""

from __future__ import annotations

import re
from typing import Any

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText
from tito_core.parsing.completion import Completion
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.sections import Section
from tito_core.parsing.json_call import json_value
from tito_core.parsing.reasoning import ReasoningTags
from tito_core.parsing.registry import register_format
from tito_core.parsing.schema import kinds_of

ANCHORS = (OPEN, CLOSE, SEPARATOR) = ("<|open|>", "<|close|>", "<|sep|>")
SECTION = Section(f"{OPEN}tools{SEPARATOR}", f"{CLOSE}tools{SEPARATOR}", f"{OPEN}call ", f"{CLOSE}call{SEPARATOR}")
ARGUMENT, END_ARGUMENT = f"{OPEN}argument ", f"{CLOSE}argument{SEPARATOR}"
_CALL = re.compile(r'tool="([^"<>\n]+)" index="[0-9]+"')
_ARGUMENT = re.compile(r'key="([^"\n]+)" type="(string|number|integer|boolean|null|object|array)"')


class KimiK3Calls(CallFormat):
    """A channel of calls."""

    tags = (SECTION.open, SECTION.close, SECTION.call, SECTION.end_call, ARGUMENT, END_ARGUMENT, *ANCHORS)
    anchors = ANCHORS
    opening = frozenset({SECTION.open})
    wrappers = (
        f"{OPEN}response{SEPARATOR}",
        f"{CLOSE}response{SEPARATOR}",
        f"{CLOSE}message{SEPARATOR}",
    )

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one channel of calls."""
        return SECTION.read(completion, start, _call)


def _call(cursor: Cursor) -> ParsedCallText:
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
    marks=Marks((SECTION.open, ARGUMENT)),
)
