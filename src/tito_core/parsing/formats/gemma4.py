"""Calls of Gemma 4 and FunctionGemma: a name and arguments in a notation of Gemma, strings between control tokens.

    <|tool_call>call:look{at:<|"|>x<|"|>,far:5,tags:[true,null]}<tool_call|>
    <start_function_call>call:look{at:<escape>x<escape>,far:5}<end_function_call>

Keys are bare words, which may contain blanks, or strings. Numbers, true, false and null are written as in JSON, or as
in Python: templates before that of 2026-07-09 write None. A string contains anything but its delimiter; a string of an
enum in the schema may be a bare word. Loose: any other bare word where the schema says string, as both engines' Gemma 4
parsers read, and no closing tag at the end of the completion, as vLLM reads.
A bare word with a quote, such as `"Paris"`, is malformed unless the schema has it: the engines keep the quotes.
Sources: the Gemma 4 templates (in TRL 1.16); vLLM 0.32, `parser/gemma4.py`; SGLang 0.5.23, `gemma4_detector.py`;
the template of FunctionGemma 270M. vLLM 0.32's parser of FunctionGemma keeps only values between `<escape>` tags, and
reads those that are JSON as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText, shortened
from tito_core.parsing.completion import Completion, JsonSchema
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.json_call import DEEPEST, json_value
from tito_core.parsing.reasoning import THOUGHT_CHANNEL
from tito_core.parsing.registry import register_format
from tito_core.parsing.typed_value import resolved, types_of

_PREFIX = "call:"
_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]*")
_WORD = re.compile(r"[^\s:,{}\[\]<>]+(?:[ \t]+[^\s:,{}\[\]<>]+)*")
_QUOTES = re.compile("[\"'`\u2018\u2019\u201c\u201d]")
_LITERALS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


class Gemma4Calls(CallFormat):
    """One call per pair of tags.

    Attributes:
        open: Opens a call.
        close: Closes it.
        quote: The delimiter of strings.
    """

    def __init__(self, open: str, close: str, quote: str) -> None:
        self.open, self.close, self.quote = self.tags = (open, close, quote)
        self.opening = frozenset({open})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call."""
        frame = completion.frame(start, start + len(self.open), self.close, self.opening)
        return completion.read_frame(frame, self.close, self._call, self_delimiting=True)

    def _call(self, cursor: Cursor) -> ParsedCallText:
        cursor.expect_blank(cursor.until_text(_PREFIX))
        name = cursor.tool_name(cursor.until_text("{"))
        schema = cursor.tools.get(name, {})
        arguments = _Notation(cursor, schema, self.quote).mapping(1, schema)
        cursor.expect_end()
        return ParsedCallText(name, arguments, loose=cursor.loose)


class _Notation:
    """Parser of Gemma's notation of values, with optional blanks between all parts."""

    def __init__(self, cursor: Cursor, whole: JsonSchema, quote: str) -> None:
        self._cursor = cursor
        self._whole = whole
        self._quote = quote

    def mapping(self, deep: int, schema: JsonSchema) -> dict[str, Any]:
        """Take the rest of a mapping, after its `{`."""
        result: dict[str, Any] = {}
        if self._skip("}"):
            return result
        properties = schema.get("properties")
        while True:
            self._cursor.skip_blank()
            bare = self._cursor.peek_here() != self._quote
            key = self._cursor.match(_WORD, "a key") if bare else self._string()
            self._expect(":")
            if key in result:
                raise self._cursor.error(f"The key {key!r} appears twice.")
            known = properties.get(key) if isinstance(properties, Mapping) else None
            if bare and known is None and _QUOTES.search(key):
                raise self._cursor.error(f"The call has {shortened(key)} where a key belongs: write it without quotes.")
            result[key] = self._value(deep, known)
            if not self._skip(","):
                self._expect("}")
                return result

    def _value(self, deep: int, schema: Any) -> Any:
        if deep >= DEEPEST:
            raise self._cursor.error(f"The call nests more than {DEEPEST} levels deep.")
        schema = resolved(schema, self._whole) if isinstance(schema, Mapping) else {}
        self._cursor.skip_blank()
        if self._cursor.peek_here() == self._quote:
            return self._string()
        if self._cursor.skip("{"):
            return self.mapping(deep + 1, schema)
        if self._cursor.skip("["):
            return self._list(deep + 1, schema.get("items"))
        word = self._cursor.match(_WORD, "a value")
        if _NUMBER.fullmatch(word):
            return json_value(word, "value", self._cursor.name)
        return self._word(word, schema)

    def _word(self, word: str, schema: JsonSchema) -> Any:
        types, options = types_of(schema, self._whole), schema.get("enum")
        listed = isinstance(options, list) and word in options
        if listed and (types == {"string"} or word not in _LITERALS):
            return word
        if word in _LITERALS:
            return _LITERALS[word]
        wrong = f"The call has {shortened(word)} where a value belongs: write strings between {self._quote} tags."
        if types != {"string"} or options is not None or _QUOTES.search(word):
            raise self._cursor.error(wrong)
        self._cursor.mark_loose(wrong)
        return word

    def _list(self, deep: int, schema: Any) -> list[Any]:
        result: list[Any] = []
        if self._skip("]"):
            return result
        while True:
            result.append(self._value(deep, schema))
            if not self._skip(","):
                self._expect("]")
                return result

    def _string(self) -> str:
        self._cursor.tag(self._quote)
        return self._cursor.until_tag(self._quote)

    def _skip(self, text: str) -> bool:
        return self._cursor.skip(text) or (self._cursor.skip_blank() and self._cursor.skip(text))

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            self._cursor.expect(text)


register_format(
    "gemma4",
    Gemma4Calls("<|tool_call>", "<tool_call|>", '<|"|>'),
    reasoning=THOUGHT_CHANNEL,
    marks=Marks(("<|tool_call>call:", '<|"|>')),
)
register_format(
    "functiongemma",
    Gemma4Calls("<start_function_call>", "<end_function_call>", "<escape>"),
    reasoning=None,
    marks=Marks(("<start_function_call>call:", "<escape>")),
)
