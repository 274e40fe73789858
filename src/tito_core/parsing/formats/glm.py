"""Calls of GLM 4.5 and later, Ling 3 and LongCat 2: a name, then keys and values, each in its own tags.

    <tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>

GLM-4.5 and 4.6 write a line break after the name, each key and each value; GLM-4.7 writes none, and allows a call
without arguments. Strings are written as they are, including blanks; other values are JSON. Sources: the GLM-4.5
template (in TRL 1.16), and vLLM 0.32, `parser/glm47_moe.py`; SGLang 0.5.23, `function_call/glm47_moe_detector.py`.
"""

from __future__ import annotations

from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.markup import Markup
from tito_core.parsing.reasoning import LONGCAT_THINK
from tito_core.parsing.registry import register_format
from tito_core.parsing.typed_value import typed_value


class GlmCalls(CallFormat):
    """One call per pair of tags.

    Attributes:
        between: The text after the name, each key and each value.
        open: Opens a call.
        close: Closes it.
        key: Opens the name of an argument.
        end_key: Closes it.
        value: Opens the value of an argument.
        end_value: Closes it.
    """

    def __init__(self, between: str, family: str = "") -> None:
        self.between = between
        self.open, self.close = f"<{family}tool_call>", f"</{family}tool_call>"
        self.key, self.end_key = f"<{family}arg_key>", f"</{family}arg_key>"
        self.value, self.end_value = f"<{family}arg_value>", f"</{family}arg_value>"
        self.tags = (self.open, self.close, self.key, self.end_key, self.value, self.end_value)
        self.opening = frozenset({self.open})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call."""
        frame = completion.frame(start, start + len(self.open), self.close, self.opening)
        after = completion.next_mark(frame.stop)
        if frame.closed and after is not None and after.tag in self.tags[1:]:  # closed before its arguments
            completion.add_malformed(start, frame.stop, f"The call has {after.tag} after its closing {self.close}.")
            return frame.stop
        return completion.read_frame(frame, self.close, self._call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        parameters = g.Parameters(lambda key, _: self._head(markup, key), self.end_value, self.between)
        calls = (
            g.sequence(g.text(name + self.between), *parameters.of(markup, schema)) for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, self.open), g.either(calls), g.tag(markup, self.close))

    def _head(self, markup: Markup, key: str) -> g.Grammar:
        between = [g.text(self.between)] if self.between else []
        head = (g.tag(markup, self.key), g.text(key), g.tag(markup, self.end_key))
        return g.sequence(*head, *between, g.tag(markup, self.value))

    def _call(self, cursor: Cursor) -> ParsedCallText:
        pairs = cursor.peek() is not None
        name = cursor.tool_name((cursor.until_tag(self.key) if pairs else cursor.take_rest()).strip())
        arguments: dict[str, Any] = {}
        while pairs:
            key = cursor.until_tag(self.end_key)
            if not key or key != key.strip() or set(key) & set("<>"):
                raise cursor.error(f"The call has no valid argument name: {key[:60]!r}.")
            if key in arguments:
                raise cursor.error(f"The argument {key!r} appears twice.")
            cursor.tag(self.value)
            arguments[key] = typed_value(cursor.until_tag(self.end_value), cursor.tools, name, key)
            if pairs := cursor.peek() is not None:
                cursor.tag(self.key)
        cursor.expect_end()
        return ParsedCallText(name, arguments)


register_format("glm45", GlmCalls("\n"), marks=Marks(("<tool_call>{function-name}\n<arg_key>",)))
register_format("glm47", GlmCalls(""), "glm", "ling3", marks=Marks(("<tool_call>{function-name}<arg_key>",)))
register_format(
    "longcat2",
    GlmCalls("\n", "longcat_"),
    reasoning=LONGCAT_THINK,
    marks=Marks(("<longcat_tool_call>", "<longcat_arg_key>")),
)
