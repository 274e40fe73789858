"""Calls of DeepSeek V3 and V3.1: a section of calls, each a name and JSON arguments.

V3 and R1 write a type, the name and a fenced block (source: the template of DeepSeek-V3, in TRL 1.16):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look
    ```json
    {"at": "x"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes only the name and the arguments (source: vLLM 0.32, `tool_parsers/deepseekv31_tool_parser.py`):

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
from tito_core.parsing.json_call import call_of_arguments
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

SECTION = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
TYPE = "function"
FENCE, END_FENCE = "\n```json\n", "\n```"


class DeepSeekCalls(CallFormat):
    """A section of calls.

    Attributes:
        fenced: Whether the call has a type and a fenced block, as in V3.
    """

    tags = (SECTION.open, SECTION.close, SECTION.call, SECTION.end_call, SEPARATOR)
    opening = frozenset({SECTION.open})

    def __init__(self, fenced: bool) -> None:
        self.fenced = fenced

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return SECTION.read(completion, start, _fenced_call if self.fenced else _plain_call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        separator = g.tag(markup, SEPARATOR)
        calls = []
        for name, schema in tools.items():
            arguments = g.arguments_json(schema)
            if self.fenced:
                calls.append(g.sequence(g.text(TYPE), separator, g.text(name + FENCE), arguments, g.text(END_FENCE)))
            else:
                calls.append(g.sequence(g.text(name), separator, arguments))
        begin = [g.tag(markup, tag) for tag in (SECTION.open, SECTION.call)]
        end = [g.tag(markup, tag) for tag in (SECTION.end_call, SECTION.close)]
        return g.sequence(*begin, g.either(calls), *end)


def _fenced_call(cursor: Cursor) -> ParsedCallText:
    kind = cursor.until_tag(SEPARATOR)
    if kind != TYPE:
        raise cursor.error(f"The call's type must be {TYPE!r}, not {kind[:60]!r}.")
    name = cursor.tool_name(cursor.until_text(FENCE))
    body = cursor.take_rest()
    if not body.endswith(END_FENCE):
        raise cursor.error(f"The arguments must end in {END_FENCE!r}.")
    return call_of_arguments(name, body.removesuffix(END_FENCE))


def _plain_call(cursor: Cursor) -> ParsedCallText:
    name = cursor.tool_name(cursor.until_tag(SEPARATOR))
    return call_of_arguments(name, cursor.take_rest())


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
