"""Calls of DeepSeek: a section of calls, in V3 and V3.1 with JSON arguments, since V3.2 with parameters (DSML).

V3 and R1 write a type, the name and a fenced block (source: the template of DeepSeek-V3, in TRL 1.16):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look
    ```json
    {"at": "x"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes only the name and the arguments (source: vLLM 0.32, `tool_parsers/deepseekv31_tool_parser.py`):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.2, V4 and V4.1 write functions; each parameter tells whether it is a string:

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="look">
    <｜DSML｜parameter name="at" string="true">x</｜DSML｜parameter>
    <｜DSML｜parameter name="far" string="false">5</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

V3.2 writes `function_calls` instead of `tool_calls`. V4.1 writes `<｜DSML｜ calls>`, with a blank before the word in
every tag. `｜DSML｜` is a control token: a tag that spells it with other tokens is text. Loose: a call outside a
section, which vLLM and SGLang read; no `string`, if the schema tells it, which vLLM reads. Sources: vLLM 0.32,
`tokenizers/deepseek_{v32,v4,v41}_encoding.py`, `parser/deepseek_v4.py` and `parser/deepseek_v41.py`.
"""

from __future__ import annotations

import re
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat, Section, quoted
from tito_core.parsing.call_values import ParsedCallText, call_of_arguments, json_value
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.schema import KINDS

SECTION = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
TYPE = "function"
FENCE, END_FENCE = "\n```json\n", "\n```"


class DeepSeekCalls(CallFormat):
    """A section of calls.

    Attributes:
        fenced: Whether the call has a type and a fenced block, as in V3.
    """

    tags = (*SECTION.tags, SEPARATOR)
    opening = frozenset({SECTION.open})
    pairs = SECTION.pairs

    def __init__(self, fenced: bool) -> None:
        self.fenced = fenced

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return SECTION.read(completion, start, _fenced_call if self.fenced else _plain_call)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
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
DSML = "｜DSML｜"
_PARAMETER_HEAD = re.compile(r' name="([^"<\n]+)(?:" string="(true|false))?')


class DsmlCalls(CallFormat):
    """A section of functions.

    Attributes:
        section: The tags of the section and of its calls.
        parameter: Opens a parameter.
        end_parameter: Closes it.
    """

    anchors = (DSML,)

    def __init__(self, block: str, space: str = "") -> None:
        begin, end = f"<{DSML}{space}", f"</{DSML}{space}"
        self.section = Section(f"{begin}{block}>", f"{end}{block}>", f"{begin}invoke", f"{end}invoke>")
        self.parameter, self.end_parameter = f"{begin}parameter", f"{end}parameter>"
        self.tags = (*self.section.tags, self.parameter, self.end_parameter)
        self.opening = frozenset({self.section.open, self.section.call})
        self.pairs = {**self.section.pairs, self.parameter: self.end_parameter}

    def read(self, completion: Completion, start: int, tag: str) -> int | None:
        """Read one section of calls, or a call outside a section."""
        if tag == self.section.open:
            return self.section.read(completion, start, self._invoke)
        if not completion.markup.certain(tag):
            return None  # text may spell it
        first = len(completion.calls)
        before = frozenset({self.section.open, self.section.close, self.section.call})
        frame = completion.frame(start, start + len(tag), self.section.end_call, before)
        stop = completion.read_frame(frame, self.section.end_call, self._invoke)
        completion.mark_loose(first, f"The call is outside a section: write {self.section.open} before it.")
        after = completion.next_mark(stop)
        closes = (
            after is not None and after.tag == self.section.close and not completion.text[stop : after.start].strip()
        )
        return after.stop if after is not None and closes else stop

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of one call."""
        parameters = g.Parameters(
            lambda key, plain: self._head(markup, key, plain), self.end_parameter, "\n", DSML, True
        )
        calls = (
            g.sequence(
                g.anchored(markup, f'{self.section.call} name="{name}">\n', DSML),
                *parameters.all(markup, schema),
                g.anchored(markup, f"{self.section.end_call}\n", DSML),
            )
            for name, schema in tools.items()
        )
        begin = g.anchored(markup, self.section.open + "\n", DSML)
        return g.sequence(begin, g.either(calls), g.anchored(markup, self.section.close, DSML))

    def _head(self, markup: Markup, key: g.TagFormat, plain: bool) -> g.TagFormat:
        begin = g.anchored(markup, f'{self.parameter} name="', DSML)
        return g.sequence(begin, key, g.text(f'" string="{str(plain).lower()}">'))

    def _invoke(self, cursor: Cursor) -> ParsedCallText:
        if not cursor.follows(' name="'):
            written = self.section.call + cursor.until_text(">")
            raise cursor.error(f'The call must begin with {self.section.call} name="...">, not {written[:60]!r}.')
        name = cursor.tool_name(quoted(cursor, " name="))
        arguments: dict[str, Any] = {}
        while cursor.peek() == self.parameter:
            cursor.tag(self.parameter)
            head = _PARAMETER_HEAD.fullmatch(written := cursor.until_text('">'))
            wrong = f'A parameter must have name="..." and string="true" or "false", not {written[:60]!r}.'
            if head is None:
                raise cursor.error(wrong)
            key, value = head[1], cursor.until_tag(self.end_parameter)
            if key in arguments:
                raise cursor.error(f"The parameter {key!r} appears twice.")
            plain = head[2] == "true"
            if head[2] is None:
                kinds = KINDS if cursor.schema is None else cursor.schema.kinds((key,))
                plain = kinds == {"string"}
                if ("string" in kinds and not plain) or value.lstrip().startswith("string="):
                    raise cursor.error(wrong)  # the value may be a string or JSON, or the attribute is in it
                cursor.mark_loose(wrong)
            arguments[key] = value if plain else json_value(value, f"value of {key!r}", name)
        cursor.expect_end()
        return ParsedCallText(name, arguments, loose=cursor.loose)


register_format(
    "deepseek_v32", DsmlCalls("function_calls"), "deepseekv32", marks=Marks(("｜DSML｜", "function_calls>"))
)
register_format(
    "deepseek_v4",
    DsmlCalls("tool_calls"),
    "deepseekv4",
    marks=Marks(("｜DSML｜", "tool_calls>"), ("function_calls>",)),
)
register_format(
    "deepseek_v41", DsmlCalls("calls", " "), "deepseekv41", marks=Marks(("｜DSML｜ calls>", "｜DSML｜ invoke"))
)
