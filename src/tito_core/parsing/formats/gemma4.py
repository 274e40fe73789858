"""Calls of Gemma 4: a name and arguments in Gemma's own notation, strings between control tokens.

    <|tool_call>call:look{at:<|"|>x<|"|>,far:5,tags:[true,null]}<tool_call|>

Keys stand bare or as strings; numbers, true, false and null are JSON's, and templates before that of 2026-07-09 write
None for null. A string holds anything but its own delimiter.
Sources: the Gemma 4 templates (in TRL 1.16); vLLM 0.32, `parser/gemma4.py`, which reads other bare words as strings.
"""

from __future__ import annotations

import re
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.json_call import DEEPEST, json_value
from tito_core.parsing.markup import Markup
from tito_core.parsing.reasoning import THOUGHT_CHANNEL
from tito_core.parsing.registry import register_format
from tito_core.parsing.said import Said
from tito_core.parsing.turn import TaggedCalls

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_PREFIX = "call:"
_KEY = re.compile(r"[^\s:,{}\[\]<>]+")
_BARE = re.compile(r"true|false|null|None|-?[0-9][0-9.eE+-]*")


class Gemma4Calls(TaggedCalls):
    """One call a pair of tags."""

    tags = (OPEN, CLOSE, QUOTE)
    opening = frozenset({OPEN})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one call."""
        frame = said.frame(opened, opened + len(OPEN), CLOSE, self.opening)
        return said.read(frame, CLOSE, _call)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Refuse: the notation is recursive, and no engine has it."""
        raise g.NoCallGrammarError(
            "A tool call cannot be forced with the parser 'gemma4': engines have no grammar for its notation of "
            "arguments. Leave the choice to the policy, or set sampling.grammar."
        )


def _call(cursor: Cursor) -> Said:
    cursor.blank(cursor.through(_PREFIX))
    name = cursor.sound_name(cursor.through("{"))
    arguments = _Notation(cursor).mapping(1)
    cursor.end()
    return Said(name, arguments)


class _Notation:
    """Gemma's notation of values."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def mapping(self, deep: int) -> dict[str, Any]:
        """Take a mapping whose `{` has been taken."""
        result: dict[str, Any] = {}
        if self._cursor.skip("}"):
            return result
        while True:
            key = self._string() if self._cursor.peek_here() == QUOTE else self._cursor.match(_KEY, "a key")
            self._cursor.need(":")
            if key in result:
                raise self._cursor.fault(f"The key {key!r} appears twice.")
            result[key] = self._value(deep)
            if not self._cursor.skip(","):
                self._cursor.need("}")
                return result

    def _value(self, deep: int) -> Any:
        if deep >= DEEPEST:
            raise self._cursor.fault(f"The call nests more than {DEEPEST} levels deep.")
        if self._cursor.peek_here() == QUOTE:
            return self._string()
        if self._cursor.skip("{"):
            return self.mapping(deep + 1)
        if self._cursor.skip("["):
            return self._list(deep + 1)
        bare = self._cursor.match(_BARE, "a value")
        return None if bare == "None" else json_value(bare, "value", self._cursor.name)

    def _list(self, deep: int) -> list[Any]:
        result: list[Any] = []
        if self._cursor.skip("]"):
            return result
        while True:
            result.append(self._value(deep))
            if not self._cursor.skip(","):
                self._cursor.need("]")
                return result

    def _string(self) -> str:
        self._cursor.tag(QUOTE)
        return self._cursor.upto(QUOTE)


register_format("gemma4", Gemma4Calls(), reasoning=THOUGHT_CHANNEL)
