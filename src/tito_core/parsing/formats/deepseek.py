"""Calls of DeepSeek V3 and V3.1: a section of calls, each a name and JSON arguments.

V3 and R1 write a type, the name and a fenced block (the template of DeepSeek-V3, in TRL 1.16):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look
    ```json
    {"at": "x"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes the name and the arguments alone (vLLM 0.32, `tool_parsers/deepseekv31_tool_parser.py`):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

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

SECTION = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
TYPE = "function"
FENCE, END_FENCE = "\n```json\n", "\n```"


class DeepSeekCalls(CallFormat):
    """A section of calls.

    Attributes:
        fenced: Whether the type comes first and the arguments stand in a fenced block, as V3 has it.
    """

    tags = (SECTION.open, SECTION.close, SECTION.call, SECTION.end_call, SEPARATOR)
    opening = frozenset({SECTION.open})

    def __init__(self, fenced: bool) -> None:
        self.fenced = fenced

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one section."""
        return SECTION.read(said, opened, _fenced_call if self.fenced else _plain_call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        separator = g.tag(markup, SEPARATOR)
        calls = []
        for name, schema in tools.items():
            arguments = g.arguments_json(schema)
            if self.fenced:
                calls.append(g.sequence(g.text(TYPE), separator, g.text(name + FENCE), arguments, g.text(END_FENCE)))
            else:
                calls.append(g.sequence(g.text(name), separator, arguments))
        opened = [g.tag(markup, tag) for tag in (SECTION.open, SECTION.call)]
        closed = [g.tag(markup, tag) for tag in (SECTION.end_call, SECTION.close)]
        return g.sequence(*opened, g.either(calls), *closed)


def _fenced_call(cursor: Cursor) -> ParsedCallText:
    kind = cursor.upto(SEPARATOR)
    if kind != TYPE:
        raise cursor.fault(f"The call's type must be {TYPE!r}, not {kind[:60]!r}.")
    name = cursor.sound_name(cursor.through(FENCE))
    body = cursor.rest()
    if not body.endswith(END_FENCE):
        raise cursor.fault(f"The arguments must end in {END_FENCE!r}.")
    return said_arguments(name, body.removesuffix(END_FENCE))


def _plain_call(cursor: Cursor) -> ParsedCallText:
    name = cursor.sound_name(cursor.upto(SEPARATOR))
    return said_arguments(name, cursor.rest())


register_format(
    "deepseek_v3",
    DeepSeekCalls(fenced=True),
    "deepseekv3",
    marks=Marks(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json")),
)
register_format(
    "deepseek_v31",
    DeepSeekCalls(fenced=False),
    "deepseekv31",
    marks=Marks(("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), ("```json",)),
)
