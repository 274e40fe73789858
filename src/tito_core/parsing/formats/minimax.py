"""Calls of MiniMax M2 and dots: a section of functions with parameters.

    <minimax:tool_call>
    <invoke name="look">
    <parameter name="at">x</parameter>
    </invoke>
    </minimax:tool_call>

dots writes `<dots_function_call>`. Strings are written as they are, including blanks; other values are JSON. Sources:
vLLM 0.32, `parser/minimax_m2.py` and `tool_parsers/dots_tool_parser.py`; SGLang 0.5.23, `function_call/minimax_m2.py`
and `function_call/dots_detector.py`. Both engines also read a JSON object between the tags of dots, which is malformed
here.
"""

from __future__ import annotations

from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import DEEPEST, Malformed, ParsedCallText, element, nested
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.formats.kimi import Section
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.schema import Choice
from tito_core.parsing.turn import ReasoningTags

PARAMETER, END_PARAMETER = "<parameter name=", "</parameter>"


class MiniMaxCalls(CallFormat):
    """A section of functions.

    Attributes:
        section: The tags of the section and of its calls.
    """

    def __init__(self, open: str, close: str) -> None:
        section = self.section = Section(open, close, "<invoke name=", "</invoke>")
        self.tags = (section.open, section.close, section.call, section.end_call, PARAMETER, END_PARAMETER)
        self.opening = frozenset({open})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return self.section.read(completion, start, _invoke)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        parameters = g.Parameters(
            lambda key, _: g.sequence(g.text(f'{PARAMETER}"'), key, g.text('">')), END_PARAMETER, "\n"
        )
        calls = (
            g.sequence(
                g.text(f'\n{self.section.call}"{name}">\n'),
                *parameters.of(markup, schema),
                g.text(f"{self.section.end_call}\n"),
            )
            for name, schema in tools.items()
        )
        begin, end = (g.tag(markup, tag) for tag in (self.section.open, self.section.close))
        return g.sequence(begin, g.either(calls), end)


def _invoke(cursor: Cursor) -> ParsedCallText:
    name = cursor.tool_name(quoted(cursor))
    arguments = parameters(cursor, PARAMETER, END_PARAMETER)
    cursor.expect_end()
    return ParsedCallText(name, arguments)


def parameters(cursor: Cursor, tag: str, end: str, in_python: bool = False) -> dict[str, Any]:
    """Take the parameters of a call, each between the tags `tag` and `end`; their names are in double quotes.

    `in_python`: see `Cursor.reading`.
    """
    arguments: dict[str, Any] = {}
    while cursor.peek() == tag:
        cursor.tag(tag)
        key = quoted(cursor)
        if key in arguments:
            raise cursor.error(f"The parameter {key!r} appears twice.")
        arguments[key] = cursor.reading(cursor.until_tag(end), in_python)
    return arguments


def quoted(cursor: Cursor, before: str = "") -> str:
    """Take a name in double quotes, with the text `before` it and the `>` after it; return the name."""
    if not cursor.follows(f'{before}"'):
        raise cursor.error(f"The name must be in double quotes: {cursor.until_text('>')[:60]!r}.")
    written = cursor.until_text('">')
    name = written.removeprefix(f'{before}"')
    if written != f'{before}"{name}' or not name or name != name.strip() or set(name) & set("<\"'\n"):
        as_written = f'{written}"'
        raise cursor.error(f"The name must be in double quotes: {as_written[:60]!r}.")
    return name


register_format(
    "minimax_m2",
    MiniMaxCalls("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax-m2",
    marks=Marks(("<minimax:tool_call>", "<invoke name=")),
)
register_format(
    "dots",
    MiniMaxCalls("<dots_function_call>", "</dots_function_call>"),
    marks=Marks(("<dots_function_call>", "<invoke name=")),
)


ANCHOR = "]<]minimax[>["
SECTION = Section(f"{ANCHOR}<tool_call>", f"{ANCHOR}</tool_call>", f"{ANCHOR}<invoke name=", f"{ANCHOR}</invoke>")
ELEMENT, END_ELEMENT = f"{ANCHOR}<", f"{ANCHOR}</"
ITEM = "item"


class MiniMaxM3Calls(CallFormat):
    """A section of functions."""

    tags = (SECTION.open, SECTION.close, SECTION.call, SECTION.end_call, ELEMENT, END_ELEMENT, ANCHOR)
    anchors = (ANCHOR,)
    opening = frozenset({SECTION.open})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return SECTION.read(completion, start, _m3_invoke)


def _m3_invoke(cursor: Cursor) -> ParsedCallText:
    name = cursor.tool_name(quoted(cursor))
    written = _elements(cursor, 1)
    cursor.expect_end()
    arguments: dict[str, Any] = {}
    for key, value in written:
        if key in arguments:
            raise cursor.error(f"The element {key!r} appears twice.")
        arguments[key] = value
    return ParsedCallText(name, arguments)


def _elements(cursor: Cursor, deep: int) -> list[tuple[str, Any]]:
    """Take the elements that come next, each with the readings of its value."""
    found = []
    while cursor.peek() == ELEMENT:
        cursor.tag(ELEMENT)
        key = _name(cursor)
        found.append((key, _value(cursor, deep)))
        if (closes := cursor.until_text(">")) != key:
            raise cursor.error(f"The element {key!r} is closed by {closes[:60]!r}.")
    return found


def _name(cursor: Cursor) -> str:
    key = cursor.until_text(">")
    if not key or key != key.strip() or not key.isprintable() or set(key) & set("<\"'=/"):
        raise cursor.error(f"The element has no valid name: {key[:60]!r}.")
    return key


def _value(cursor: Cursor, deep: int) -> Choice:
    """Take a value and the tag after it, up to the name in that tag."""
    if deep >= DEEPEST:
        raise cursor.error(f"The call nests more than {DEEPEST} levels deep.")
    if cursor.peek() != ELEMENT:
        return element(cursor.until_tag(END_ELEMENT))
    members = _elements(cursor, deep + 1)
    cursor.tag(END_ELEMENT)
    try:
        return nested(members, ITEM)
    except Malformed as fault:
        raise cursor.error(fault.reason) from None


register_format(
    "minimax_m3",
    MiniMaxM3Calls(),
    "minimax-m3",
    reasoning=ReasoningTags("<mm:think>", "</mm:think>"),
    marks=Marks((ANCHOR, "<invoke name=")),
)
