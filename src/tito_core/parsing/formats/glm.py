"""Calls of GLM 4.5 and later: a name, then keys and values in tags of their own.

    <tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>

GLM-4.5 and 4.6 write a line break after the name, each key and each value; GLM-4.7 writes none, and needs no arguments.
Strings stand as they are, blanks included; other values are JSON. Sources: the GLM-4.5 template (in TRL 1.16), and
vLLM 0.32, `parser/glm47_moe.py`; SGLang 0.5.23, `function_call/glm47_moe_detector.py`.
"""

from __future__ import annotations

from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format
from tito_core.parsing.said import Said
from tito_core.parsing.typed_value import typed_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
_INNER = frozenset({CLOSE, KEY, END_KEY, VALUE, END_VALUE})


class GlmCalls(CallFormat):
    """One call a pair of tags.

    Attributes:
        between: What is written after the name, each key and each value.
    """

    tags = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    opening = frozenset({OPEN})

    def __init__(self, between: str) -> None:
        self.between = between

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one call."""
        frame = said.frame(opened, opened + len(OPEN), CLOSE, self.opening)
        after = said.next(frame.stop)
        if frame.closed and after is not None and after.tag in _INNER:  # the call closed before its arguments did
            said.malformed(opened, frame.stop, f"The call has {after.tag} after its closing {CLOSE}.")
            return frame.stop
        return said.read(frame, CLOSE, _call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        parameters = g.Parameters(lambda key, _: self._head(markup, key), END_VALUE, self.between)
        calls = (
            g.sequence(g.text(name + self.between), *parameters.of(markup, schema)) for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, OPEN), g.either(calls), g.tag(markup, CLOSE))

    def _head(self, markup: Markup, key: str) -> g.Grammar:
        between = [g.text(self.between)] if self.between else []
        return g.sequence(g.tag(markup, KEY), g.text(key), g.tag(markup, END_KEY), *between, g.tag(markup, VALUE))


def _call(cursor: Cursor) -> Said:
    pairs = cursor.peek() is not None
    name = cursor.sound_name((cursor.upto(KEY) if pairs else cursor.rest()).strip())
    arguments: dict[str, Any] = {}
    while pairs:
        key = cursor.upto(END_KEY)
        if not key or key != key.strip() or set(key) & set("<>"):
            raise cursor.fault(f"The call has no sound argument name: {key[:60]!r}.")
        if key in arguments:
            raise cursor.fault(f"The argument {key!r} appears twice.")
        cursor.tag(VALUE)
        arguments[key] = typed_value(cursor.upto(END_VALUE), cursor.tools, name, key)
        if pairs := cursor.peek() is not None:
            cursor.tag(KEY)
    cursor.end()
    return Said(name, arguments)


register_format("glm45", GlmCalls("\n"), marks=Marks(("<tool_call>{function-name}\n<arg_key>",)))
register_format("glm47", GlmCalls(""), "glm", marks=Marks(("<tool_call>{function-name}<arg_key>",)))
