"""Calls of MiniMax M2: a section of functions with parameters.

    <minimax:tool_call>
    <invoke name="look">
    <parameter name="at">x</parameter>
    </invoke>
    </minimax:tool_call>

Strings are written as they are, including blanks; other values are JSON. Sources: vLLM 0.32, `parser/minimax_m2.py`;
SGLang 0.5.23, `function_call/minimax_m2.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.sections import Section
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format
from tito_core.parsing.typed_value import typed_value

SECTION = Section("<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>")
PARAMETER, END_PARAMETER = "<parameter name=", "</parameter>"


class MiniMaxCalls(CallFormat):
    """A section of functions."""

    tags = (SECTION.open, SECTION.close, SECTION.call, SECTION.end_call, PARAMETER, END_PARAMETER)
    opening = frozenset({SECTION.open})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return SECTION.read(completion, start, _invoke)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        parameters = g.Parameters(lambda key, _: g.text(f'{PARAMETER}"{key}">'), END_PARAMETER, "\n")
        calls = (
            g.sequence(
                g.text(f'\n{SECTION.call}"{name}">\n'),
                *parameters.of(markup, schema),
                g.text(f"{SECTION.end_call}\n"),
            )
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, SECTION.open), g.either(calls), g.tag(markup, SECTION.close))


def _invoke(cursor: Cursor) -> ParsedCallText:
    name = cursor.tool_name(quoted(cursor, cursor.until_text(">")))
    arguments = parameters(cursor, name, PARAMETER, END_PARAMETER)
    cursor.expect_end()
    return ParsedCallText(name, arguments)


def parameters(
    cursor: Cursor, name: str, tag: str, end: str, literal: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """Take the parameters of a call, each between the tags `tag` and `end`; their names are in double quotes."""
    arguments: dict[str, Any] = {}
    while cursor.peek() == tag:
        cursor.tag(tag)
        key = quoted(cursor, cursor.until_text(">"))
        if key in arguments:
            raise cursor.error(f"The parameter {key!r} appears twice.")
        arguments[key] = typed_value(cursor.until_tag(end), cursor.tools, name, key, literal)
    return arguments


def quoted(cursor: Cursor, written: str) -> str:
    """Return a name without its double quotes."""
    name = written[1:-1]
    if written != f'"{name}"' or not name or name != name.strip() or set(name) & set("<\"'\n"):
        raise cursor.error(f"The name must be in double quotes: {written[:60]!r}.")
    return name


register_format("minimax_m2", MiniMaxCalls(), "minimax-m2", marks=Marks(("<minimax:tool_call>", "<invoke name=")))
