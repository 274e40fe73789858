"""Calls of MiniMax M3: a section of functions whose arguments are elements, nested like their values.

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

from typing import Any

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import DEEPEST, Malformed, ParsedCallText
from tito_core.parsing.completion import Completion
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.minimax_m2 import quoted
from tito_core.parsing.formats.sections import Section
from tito_core.parsing.reasoning import ReasoningTags
from tito_core.parsing.registry import register_format
from tito_core.parsing.schema import Choice
from tito_core.parsing.typed_value import element, nested

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
        return SECTION.read(completion, start, _invoke)


def _invoke(cursor: Cursor) -> ParsedCallText:
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
