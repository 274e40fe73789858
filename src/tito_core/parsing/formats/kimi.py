"""Calls of Kimi: a section of calls, in K2 with an id and JSON, in K3 with typed arguments.

K2 writes an id that contains the name, and JSON arguments:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "x"}
    <|tool_call_end|><|tool_calls_section_end|>

The template repeats the id in the tool's result, so the id is kept as sampled. Sources: vLLM 0.32, `parser/kimi_k2.py`;
SGLang 0.5.23, `function_call/kimik2_detector.py`, which guesses the name for an id that is only a number; here such a
call is malformed. Loose: an id without `functions.`, which both engines read.

K3 writes a channel of calls whose arguments give their JSON type:

    <|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" type="string"<|sep|>x
    <|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>

Strings are written as they are, other values as JSON. Names and keys write `"` as `&quot;` and `&` as `&amp;`.
Reasoning and the answer are in channels of their own. `<|open|>`, `<|close|>` and `<|sep|>` are control tokens: a tag
that spells them with other tokens is text. Sources: vLLM 0.32, `tool_parsers/kimi_k3_tool_parser.py`; SGLang 0.5.23,
`function_call/kimik3_format.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat, Section
from tito_core.parsing.call_values import ParsedCallText, call_of_arguments, json_value
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.schema import kinds_of
from tito_core.parsing.turn import ReasoningTags

K2_SECTION = Section(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)
K2_ARGUMENTS = "<|tool_call_argument_begin|>"
_K2_ID = re.compile(r"functions\.(.+):[0-9]+|([\w-]+):[0-9]+")


class KimiCalls(CallFormat):
    """A section of calls with ids."""

    tags = (*K2_SECTION.tags, K2_ARGUMENTS)
    opening = frozenset({K2_SECTION.open})
    pairs = K2_SECTION.pairs

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return K2_SECTION.read(completion, start, self._call)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of one call."""
        number, arguments = {"type": "regex", "pattern": "[0-9]+"}, g.tag(markup, K2_ARGUMENTS)
        calls = (
            g.sequence(g.text(f"functions.{name}:"), number, arguments, g.arguments_json(schema))
            for name, schema in tools.items()
        )
        begin = [g.tag(markup, tag) for tag in (K2_SECTION.open, K2_SECTION.call)]
        end = [g.tag(markup, tag) for tag in (K2_SECTION.end_call, K2_SECTION.close)]
        return g.sequence(*begin, g.either(calls), *end)

    @staticmethod
    def _call(cursor: Cursor) -> ParsedCallText:
        written = cursor.until_tag(K2_ARGUMENTS).strip()
        match = _K2_ID.fullmatch(written)
        wrong = f"The call's id must be functions.NAME:NUMBER, not {written[:60]!r}."
        if match is None:
            raise cursor.error(wrong)
        call = call_of_arguments(cursor.tool_name(match[1] or match[2]), cursor.take_rest(), written)
        return call if match[1] else replace(call, loose=wrong)


register_format("kimi_k2", KimiCalls(), marks=Marks(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")))

ANCHORS = (OPEN, CLOSE, SEPARATOR) = ("<|open|>", "<|close|>", "<|sep|>")
K3_SECTION = Section(
    f"{OPEN}tools{SEPARATOR}",
    f"{CLOSE}tools{SEPARATOR}",
    f"{OPEN}call ",
    f"{CLOSE}call{SEPARATOR}",
)
ARGUMENT, END_ARGUMENT = f"{OPEN}argument ", f"{CLOSE}argument{SEPARATOR}"
_CALL_HEAD = re.compile(r'tool="([^"<>\n]+)" index="[0-9]+"')
_ARGUMENT_HEAD = re.compile(r'key="([^"\n]+)" type="(string|number|integer|boolean|null|object|array)"')


class KimiK3Calls(CallFormat):
    """A channel of calls."""

    tags = (*K3_SECTION.tags, ARGUMENT, END_ARGUMENT, *ANCHORS)
    anchors = ANCHORS
    opening = frozenset({K3_SECTION.open})
    pairs: Mapping[str, str] = {**K3_SECTION.pairs, ARGUMENT: END_ARGUMENT}
    wrappers = (
        f"{OPEN}response{SEPARATOR}",
        f"{CLOSE}response{SEPARATOR}",
        f"{CLOSE}message{SEPARATOR}",
    )

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one channel of calls."""
        return K3_SECTION.read(completion, start, self._call)

    @staticmethod
    def _call(cursor: Cursor) -> ParsedCallText:
        head = _CALL_HEAD.fullmatch(written := cursor.until_tag(SEPARATOR).strip())
        if head is None and (head := _CALL_HEAD.fullmatch(" ".join(written.split()))):
            cursor.mark_loose(f"The call has more than one blank between its attributes: {written[:60]!r}.")
        if head is None:
            raise cursor.error(f'The call must have tool="..." and index="...", not {written[:60]!r}.')
        name = cursor.tool_name(_plain(head[1]))
        arguments: dict[str, Any] = {}
        while cursor.peek() == ARGUMENT:
            cursor.tag(ARGUMENT)
            match = _ARGUMENT_HEAD.fullmatch(written := cursor.until_tag(SEPARATOR).strip())
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
