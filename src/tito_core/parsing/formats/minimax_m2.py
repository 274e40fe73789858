"""Calls of MiniMax M2: a section of functions with parameters.

    <minimax:tool_call>
    <invoke name="look">
    <parameter name="at">x</parameter>
    </invoke>
    </minimax:tool_call>

Values stand between the tags as they are, blanks included. Sources: vLLM 0.32, `parser/minimax_m2.py`; SGLang 0.5.23,
`function_call/minimax_m2.py`.
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

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one section."""
        return SECTION.read(said, opened, _invoke)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
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
    name = cursor.sound_name(quoted(cursor, cursor.through(">")))
    arguments = parameters(cursor, name, PARAMETER, END_PARAMETER)
    cursor.end()
    return ParsedCallText(name, arguments)


def parameters(
    cursor: Cursor, name: str, tag: str, end: str, literal: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """Take parameters whose names stand in quotes, each between two tags."""
    arguments: dict[str, Any] = {}
    while cursor.peek() == tag:
        cursor.tag(tag)
        key = quoted(cursor, cursor.through(">"))
        if key in arguments:
            raise cursor.fault(f"The parameter {key!r} appears twice.")
        arguments[key] = typed_value(cursor.upto(end), cursor.tools, name, key, literal)
    return arguments


def quoted(cursor: Cursor, written: str) -> str:
    """Return the name that is written in double quotes."""
    name = written[1:-1]
    if written != f'"{name}"' or not name or name != name.strip() or set(name) & set("<\"'\n"):
        raise cursor.fault(f"There is no name in double quotes: {written[:60]!r}.")
    return name


register_format("minimax_m2", MiniMaxCalls(), "minimax-m2", marks=Marks(("<minimax:tool_call>", "<invoke name=")))
