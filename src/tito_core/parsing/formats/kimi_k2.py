"""Calls of Kimi K2: a section of calls, each an id that holds the name, and JSON arguments.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "x"}
    <|tool_call_end|><|tool_calls_section_end|>

The template echoes the id in the tool's result, so it is kept as sampled. Sources: vLLM 0.32, `parser/kimi_k2.py`;
SGLang 0.5.23, `function_call/kimik2_detector.py`, which guesses the name for a bare number: here that is malformed.
Loose: an id without `functions.`, which both read.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.sections import Section
from tito_core.parsing.json_call import said_arguments
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

SECTION = Section(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)
ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"functions\.(.+):[0-9]+|([\w-]+):[0-9]+")


class KimiCalls(CallFormat):
    """A section of calls with ids."""

    tags = (SECTION.open, SECTION.close, SECTION.call, SECTION.end_call, ARGUMENTS)
    opening = frozenset({SECTION.open})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one section."""
        return SECTION.read(said, opened, _call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        number, begin = {"type": "regex", "pattern": "[0-9]+"}, g.tag(markup, ARGUMENTS)
        calls = (
            g.sequence(g.text(f"functions.{name}:"), number, begin, g.arguments_json(schema))
            for name, schema in tools.items()
        )
        opened = [g.tag(markup, tag) for tag in (SECTION.open, SECTION.call)]
        closed = [g.tag(markup, tag) for tag in (SECTION.end_call, SECTION.close)]
        return g.sequence(*opened, g.either(calls), *closed)


def _call(cursor: Cursor) -> ParsedCallText:
    written = cursor.upto(ARGUMENTS).strip()
    match = _ID.fullmatch(written)
    wrong = f"The call's id must be functions.NAME:NUMBER, not {written[:60]!r}."
    if match is None:
        raise cursor.fault(wrong)
    said = said_arguments(cursor.sound_name(match[1] or match[2]), cursor.rest(), written)
    return said if match[1] else replace(said, loose=wrong)


register_format("kimi_k2", KimiCalls(), marks=Marks(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")))
