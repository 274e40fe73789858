"""Calls of MiniMax M3: a section of functions whose arguments are elements, nested like their values.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="look">]<]minimax[>[<at>x]<]minimax[>[</at>]<]minimax[>[<all>]<]minimax[>[<item>1
    ]<]minimax[>[</item>]<]minimax[>[</all>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

The members of an object are elements with their names, those of a list are `<item>`s; a null member is left out. Other
values are written as they are and get their type from the schema. `]<]minimax[>[` is a control token: a tag that spells
it with other tokens is text.
Sources: the MiniMax M3 template; vLLM 0.32, `parser/minimax_m3.py`; SGLang 0.5.23, `function_call/minimax_m3.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText
from tito_core.parsing.completion import Completion, JsonSchema
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.minimax_m2 import quoted
from tito_core.parsing.formats.sections import Section
from tito_core.parsing.json_call import DEEPEST
from tito_core.parsing.reasoning import ReasoningTags
from tito_core.parsing.registry import register_format
from tito_core.parsing.typed_value import resolved, types_of, value_of

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
    name = cursor.tool_name(quoted(cursor, cursor.until_text(">")))
    schema = cursor.tools.get(name, {})
    arguments = _Elements(cursor, name, schema).members(schema, 1)
    cursor.expect_end()
    return ParsedCallText(name, arguments)


class _Elements:
    """Parses elements by their schema."""

    def __init__(self, cursor: Cursor, name: str, whole: JsonSchema) -> None:
        self._cursor = cursor
        self._name = name
        self._whole = whole

    def members(self, schema: JsonSchema, deep: int) -> dict[str, Any]:
        """Take the elements that come next, as the members of an object."""
        result: dict[str, Any] = {}
        properties = schema.get("properties")
        while self._cursor.peek() == ELEMENT:
            key = self._begin()
            if key in result:
                raise self._cursor.error(f"The element {key!r} appears twice.")
            known = properties.get(key) if isinstance(properties, Mapping) else None
            result[key] = self._value(known or schema.get("additionalProperties"), key, deep)
        return result

    def _begin(self) -> str:
        self._cursor.tag(ELEMENT)
        key = self._cursor.until_text(">")
        if not key or key != key.strip() or not key.isprintable() or set(key) & set("<\"'=/"):
            raise self._cursor.error(f"The element has no valid name: {key[:60]!r}.")
        return key

    def _value(self, given: Any, key: str, deep: int) -> Any:
        if deep >= DEEPEST:
            raise self._cursor.error(f"The call nests more than {DEEPEST} levels deep.")
        schema = resolved(given, self._whole) if isinstance(given, Mapping) else {}
        text = self._cursor.until_tag(ELEMENT, END_ELEMENT) if self._cursor.peek() == END_ELEMENT else None
        if text is not None:
            value = self._leaf(text, schema, key)
        else:
            value = self._nested(schema, key, deep)
            self._cursor.tag(END_ELEMENT)
        if (closes := self._cursor.until_text(">")) != key:
            raise self._cursor.error(f"The element {key!r} is closed by {closes[:60]!r}.")
        return value

    def _leaf(self, text: str, schema: JsonSchema, key: str) -> Any:
        types = types_of(schema, self._whole) or set()
        if not text.strip() and "string" not in types:
            if "array" in types:
                return []
            if "object" in types:
                return {}
        return value_of(text, schema, self._whole, self._name, key)

    def _nested(self, schema: JsonSchema, key: str, deep: int) -> Any:
        types = types_of(schema, self._whole)
        if types is not None and not types & {"array", "object"}:
            raise self._cursor.error(f"The value of {key!r} must be of type {' or '.join(sorted(types))}.")
        if types is None or "array" not in types:
            return self.members(schema, deep + 1)
        items = []
        while self._cursor.peek() == ELEMENT:
            if (name := self._begin()) != ITEM:
                raise self._cursor.error(f"The list {key!r} holds <{name[:60]}> where <{ITEM}> belongs.")
            items.append(self._value(schema.get("items"), ITEM, deep + 1))
        return items


register_format(
    "minimax_m3",
    MiniMaxM3Calls(),
    "minimax-m3",
    reasoning=ReasoningTags("<mm:think>", "</mm:think>"),
    marks=Marks((ANCHOR, "<invoke name=")),
)
