"""Calls in a section of functions with named parameters: MiniMax M2, dots and Step 3; in MiniMax M3, nested elements.

MiniMax M2:

    <minimax:tool_call>
    <invoke name="look">
    <parameter name="at">x</parameter>
    </invoke>
    </minimax:tool_call>

dots writes `<dots_function_call>`. Strings are written as they are, including blanks; other values are JSON. Sources:
vLLM 0.32, `parser/minimax_m2.py` and `tool_parsers/dots_tool_parser.py`; SGLang 0.5.23, `function_call/minimax_m2.py`
and `function_call/dots_detector.py`. Both engines also read a JSON object between the tags of dots, which is malformed
here.

Step 3 (Step 3.5 writes calls as Qwen3-Coder does):

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>
    function<｜tool_sep｜><steptml:invoke name="look"><steptml:parameter name="at">x</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

Values are written as they are; the template writes lists and objects as Python does. Sources: the description in the
template of Step 3 (what it renders has a misspelt tag); vLLM 0.32, `tool_parsers/step3_tool_parser.py`; SGLang 0.5.23,
`function_call/step3_detector.py`.

MiniMax M3:

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="look">]<]minimax[>[<at>x]<]minimax[>[</at>]<]minimax[>[<all>]<]minimax[>[<item>1
    ]<]minimax[>[</item>]<]minimax[>[</all>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The members of an object are elements with their names, those of a list are `<item>`s; a null member is left out. Other
values are written as they are and get their type from the schema. Where the schema allows several readings, elements
that are all `<item>`s are a list, and an empty element is an empty string. `]<]minimax[>[` is a control token: a tag
that spells it with other tokens is text.
Sources: the MiniMax M3 template; vLLM 0.32, `parser/minimax_m3.py`; SGLang 0.5.23, `function_call/minimax_m3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat, Section, parameters, quoted
from tito_core.parsing.call_values import DEEPEST, Malformed, ParsedCallText, element, nested
from tito_core.parsing.completion import Completion, Cursor, Tools
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
        self.tags = (*section.tags, PARAMETER, END_PARAMETER)
        self.opening = frozenset({open})
        self.pairs = {**section.pairs, PARAMETER: END_PARAMETER}

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return self.section.read(completion, start, self._call)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of one call."""
        parameters = g.Parameters(
            lambda key, _: g.sequence(g.text(f'{PARAMETER}"'), key, g.text('">')), END_PARAMETER, "\n"
        )
        calls = (
            g.sequence(
                g.text(f'\n{self.section.call}"{name}">\n'),
                *parameters.all(markup, schema),
                g.text(f"{self.section.end_call}\n"),
            )
            for name, schema in tools.items()
        )
        begin, end = (g.tag(markup, tag) for tag in (self.section.open, self.section.close))
        return g.sequence(begin, g.either(calls), end)

    @staticmethod
    def _call(cursor: Cursor) -> ParsedCallText:
        name = cursor.tool_name(quoted(cursor))
        arguments = parameters(cursor, PARAMETER, END_PARAMETER)
        cursor.expect_end()
        return ParsedCallText(name, arguments)


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

STEP3_SECTION = Section(
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
)
SEPARATOR, TYPE = "<｜tool_sep｜>", "function"
INVOKE, END_INVOKE = "<steptml:invoke name=", "</steptml:invoke>"
STEP3_PARAMETER, STEP3_END_PARAMETER = "<steptml:parameter name=", "</steptml:parameter>"


class Step3Calls(CallFormat):
    """A section of functions."""

    tags = (*STEP3_SECTION.tags, SEPARATOR, INVOKE, END_INVOKE, STEP3_PARAMETER, STEP3_END_PARAMETER)
    opening = frozenset({STEP3_SECTION.open})
    pairs: Mapping[str, str] = {**STEP3_SECTION.pairs, INVOKE: END_INVOKE, STEP3_PARAMETER: STEP3_END_PARAMETER}

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return STEP3_SECTION.read(completion, start, self._call)

    @staticmethod
    def _call(cursor: Cursor) -> ParsedCallText:
        kind = cursor.until_tag(SEPARATOR).strip()
        if kind != TYPE:
            raise cursor.error(f"The call's type must be {TYPE!r}, not {kind[:60]!r}.")
        cursor.tag(INVOKE)
        name = cursor.tool_name(quoted(cursor))
        arguments = parameters(cursor, STEP3_PARAMETER, STEP3_END_PARAMETER, in_python=True)
        cursor.tag(END_INVOKE)
        cursor.expect_end()
        return ParsedCallText(name, arguments)


register_format("step3", Step3Calls(), marks=Marks(("<steptml:invoke", STEP3_SECTION.open)))

ANCHOR = "]<]minimax[>["
M3_SECTION = Section(f"{ANCHOR}<tool_call>", f"{ANCHOR}</tool_call>", f"{ANCHOR}<invoke name=", f"{ANCHOR}</invoke>")
ELEMENT, END_ELEMENT = f"{ANCHOR}<", f"{ANCHOR}</"
ITEM = "item"


class MiniMaxM3Calls(CallFormat):
    """A section of functions."""

    tags = (*M3_SECTION.tags, ELEMENT, END_ELEMENT, ANCHOR)
    anchors = (ANCHOR,)
    opening = frozenset({M3_SECTION.open})
    pairs: Mapping[str, str] = {**M3_SECTION.pairs, ELEMENT: END_ELEMENT}

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return M3_SECTION.read(completion, start, self._call)

    @staticmethod
    def _call(cursor: Cursor) -> ParsedCallText:
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
        key = _element_name(cursor)
        found.append((key, _element_value(cursor, deep)))
        if (closes := cursor.until_text(">")) != key:
            raise cursor.error(f"The element {key!r} is closed by {closes[:60]!r}.")
    return found


def _element_name(cursor: Cursor) -> str:
    key = cursor.until_text(">")
    if not key or key != key.strip() or not key.isprintable() or set(key) & set("<\"'=/"):
        raise cursor.error(f"The element has no valid name: {key[:60]!r}.")
    return key


def _element_value(cursor: Cursor, deep: int) -> Choice:
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
