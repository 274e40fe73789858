"""Calls of Kimi K2: a section of calls, each with an id that contains the name, and JSON arguments.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "x"}
    <|tool_call_end|><|tool_calls_section_end|>

The template repeats the id in the tool's result, so the id is kept as sampled. Sources: vLLM 0.32, `parser/kimi_k2.py`;
SGLang 0.5.23, `function_call/kimik2_detector.py`, which guesses the name for an id that is only a number; here such a
call is malformed. Loose: an id without `functions.`, which both engines read.
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
from tito_core.parsing.json_call import call_of_arguments
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

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return SECTION.read(completion, start, _call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        number, arguments = {"type": "regex", "pattern": "[0-9]+"}, g.tag(markup, ARGUMENTS)
        calls = (
            g.sequence(g.text(f"functions.{name}:"), number, arguments, g.arguments_json(schema))
            for name, schema in tools.items()
        )
        begin = [g.tag(markup, tag) for tag in (SECTION.open, SECTION.call)]
        end = [g.tag(markup, tag) for tag in (SECTION.end_call, SECTION.close)]
        return g.sequence(*begin, g.either(calls), *end)


def _call(cursor: Cursor) -> ParsedCallText:
    written = cursor.until_tag(ARGUMENTS).strip()
    match = _ID.fullmatch(written)
    wrong = f"The call's id must be functions.NAME:NUMBER, not {written[:60]!r}."
    if match is None:
        raise cursor.error(wrong)
    call = call_of_arguments(cursor.tool_name(match[1] or match[2]), cursor.take_rest(), written)
    return call if match[1] else replace(call, loose=wrong)


register_format("kimi_k2", KimiCalls(), marks=Marks(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")))
