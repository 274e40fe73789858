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
from typing import Any

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import DEEPEST, ParsedCallText, json_value, shortened
from tito_core.parsing.completion import Completion, Cursor
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.schema import KINDS, Choice, Path
from tito_core.parsing.turn import THOUGHT_CHANNEL

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
        self.pairs = {open: close, quote: quote}

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call."""
        frame = completion.frame(start, start + len(self.open), self.close, self.opening)
        return completion.read_frame(frame, self.close, self._call, self_delimiting=True)

    def _call(self, cursor: Cursor) -> ParsedCallText:
        cursor.expect_blank(cursor.until_text(_PREFIX))
        name = cursor.tool_name(cursor.until_text("{"))
        arguments = _Notation(cursor, self.quote).mapping(())
        cursor.expect_end()
        return ParsedCallText(name, arguments, loose=cursor.loose)


class _Notation:
    """Parser of Gemma's notation of values, with optional blanks between all parts."""

    def __init__(self, cursor: Cursor, quote: str) -> None:
        self._cursor = cursor
        self._schema = cursor.schema
        self._quote = quote

    def mapping(self, path: Path) -> dict[str, Any]:
        """Take the rest of a mapping, after its `{`; `path` is its place in the arguments."""
        result: dict[str, Any] = {}
        if self._skip("}"):
            return result
        while True:
            self._cursor.skip_blank()
            bare = self._cursor.peek_here() != self._quote
            key = self._cursor.match(_WORD, "a key") if bare else self._string()
            self._expect(":")
            if key in result:
                raise self._cursor.error(f"The key {key!r} appears twice.")
            if bare and _QUOTES.search(key) and (self._schema is None or key not in self._schema.names(path)):
                raise self._cursor.error(f"The call has {shortened(key)} where a key belongs: write it without quotes.")
            result[key] = self._value((*path, key))
            if not self._skip(","):
                self._expect("}")
                return result

    def _value(self, path: Path) -> Any:
        if len(path) >= DEEPEST:
            raise self._cursor.error(f"The call nests more than {DEEPEST} levels deep.")
        self._cursor.skip_blank()
        if self._cursor.peek_here() == self._quote:
            return self._string()
        if self._cursor.skip("{"):
            return self.mapping(path)
        if self._cursor.skip("["):
            return self._list(path)
        word = self._cursor.match(_WORD, "a value")
        if _NUMBER.fullmatch(word):
            return json_value(word, "value", self._cursor.name)
        return self._word(word, path)

    def _word(self, word: str, path: Path) -> Any:
        options = None if self._schema is None else self._schema.enumerated(path)
        listed = options is not None and word in options
        if word in _LITERALS:
            return Choice((_LITERALS[word], word)) if listed else _LITERALS[word]
        if listed:
            return word
        wrong = f"The call has {shortened(word)} where a value belongs: write strings between {self._quote} tags."
        kinds = KINDS if self._schema is None else self._schema.kinds(path)
        if kinds != {"string"} or options is not None or _QUOTES.search(word):
            raise self._cursor.error(wrong)
        self._cursor.mark_loose(wrong)
        return word

    def _list(self, path: Path) -> list[Any]:
        result: list[Any] = []
        if self._skip("]"):
            return result
        while True:
            result.append(self._value((*path, len(result))))
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
