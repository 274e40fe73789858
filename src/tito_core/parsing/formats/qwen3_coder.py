"""Calls of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: a function with parameters on lines of their own.

    <tool_call>
    <function=look>
    <parameter=at>
    x
    </parameter>
    </function>
    </tool_call>

Sources: the chat templates of Qwen3.5 to 3.8 and of Nemotron 3 (both in TRL 1.16), and vLLM 0.32, `parser/qwen3.py` and
`parser/nemotron_v3.py`. A value that stands on the tag's own line is taken as it is, as vLLM's description has it.
"""

from __future__ import annotations

from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format
from tito_core.parsing.said import Said
from tito_core.parsing.turn import TaggedCalls
from tito_core.parsing.typed_value import typed_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class Qwen3CoderCalls(TaggedCalls):
    """One function a call."""

    tags = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
    opening = frozenset({OPEN})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one call."""
        frame = said.frame(opened, opened + len(OPEN), CLOSE, self.opening)
        return said.read(frame, CLOSE, _function)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        parameters = g.Parameters(lambda key, _: g.text(f"{PARAMETER}{key}>\n"), f"\n{END_PARAMETER}", "\n")
        functions = (
            g.sequence(g.text(f"\n{FUNCTION}{name}>\n"), *parameters.of(markup, schema), g.text(f"{END_FUNCTION}\n"))
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, OPEN), g.either(functions), g.tag(markup, CLOSE))


def _function(cursor: Cursor) -> Said:
    cursor.tag(FUNCTION)
    name = cursor.sound_name(cursor.through(">"))
    arguments: dict[str, Any] = {}
    while cursor.peek() == PARAMETER:
        cursor.tag(PARAMETER)
        key = _key(cursor)
        if key in arguments:
            raise cursor.fault(f"The parameter {key!r} appears twice.")
        arguments[key] = typed_value(_unframed(cursor, key), cursor.tools, name, key)
    cursor.tag(END_FUNCTION)
    cursor.end()
    return Said(name, arguments)


def _key(cursor: Cursor) -> str:
    key = cursor.through(">")
    if not key or key != key.strip() or not key.isprintable() or set(key) & set("<\"'="):
        raise cursor.fault(f"The parameter has no sound name: {key[:60]!r}.")
    return key


def _unframed(cursor: Cursor, key: str) -> str:
    """Take a value without the line breaks that set it apart, which it has on both sides or on none."""
    value = cursor.upto(END_PARAMETER)
    framed = value.startswith("\n") + value.endswith("\n")
    if value == "\n" or framed == 1:
        raise cursor.fault(f"The value of {key!r} must stand on lines of its own.")
    return value[1:-1] if framed else value


register_format("qwen3_coder", Qwen3CoderCalls(), "qwen_xml", "nemotron", "nemotron_v3")
