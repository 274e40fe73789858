"""Parse a list of Python calls with literal arguments, without compiling or running anything."""

from __future__ import annotations

import re
from typing import Any

from tito_core.parsing.call_text import DEEPEST, Malformed, ParsedCallText, shortened

_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"\w[\w./-]*")
"""Templates write the tool's own name, also one that Python does not allow."""
_KEY = re.compile(r"[^\s()\[\]{}=,'\"]+")
"""The same for the names of arguments."""
_KEYWORD = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?(?![\w.])")
_STRING = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
_STRING_BREAKS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_SIMPLE = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_LONGEST_NUMBER = 4000
"""Digits; Python does not convert integers of more than 4300."""


def literal(text: str) -> Any:
    """Parse one literal as `repr` writes it, without trailing commas.

    Raises:
        Malformed: The text is not exactly one literal.
    """
    reader = Calls(text, 0, len(text), trailing=False)
    value = reader._value(1)
    if text[reader.at :].strip():
        raise Malformed(f"Stray text follows the literal: {shortened(text[reader.at :].strip())}.")
    return value


class Calls:
    """Parser of `[name(keyword=literal, ...), ...]` in characters `start` to `stop` of a text.

    Attributes:
        at: The next character.
        stop: One past the last character.
        lines: Whether each call is on its own line, without brackets and commas.
        trailing: Whether a comma may follow the last item of a list or an object.
    """

    def __init__(
        self, text: str, start: int, stop: int, lines: bool = False, trailing: bool = True, breaks: bool = False
    ) -> None:
        self._text = text
        self.stop = stop
        self.at = start
        self.lines = lines
        self.trailing = trailing
        self._strings = _STRING_BREAKS if breaks else _STRING  # whether a string may have raw line breaks

    @property
    def at_end(self) -> bool:
        """Whether the text is valid up to its end, so that more text could complete it."""
        return self._after_blank() >= self.stop or self._in_open_string()

    def read(self) -> list[tuple[ParsedCallText, int]]:
        """Return the calls, each with the character after it.

        Raises:
            Malformed: The text is not such a list.
        """
        if self.lines:
            return self._lines()
        self._expect("[")
        calls = []
        while True:
            calls.append(self._call())
            if not self._skip(","):
                self._expect("]")
                return calls

    def _lines(self) -> list[tuple[ParsedCallText, int]]:
        calls = [self._call()]
        while self._after_blank() < self.stop:
            if "\n" not in self._text[self.at : self._after_blank()]:
                raise self._unexpected("a line break")
            calls.append(self._call())
        return calls

    def _call(self) -> tuple[ParsedCallText, int]:
        name = self._match(_NAME, "a tool's name")
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._skip(")"):
            key = self._match(_KEY, "a keyword")
            self._expect("=")
            if key in arguments:
                raise Malformed(f"The keyword {key!r} appears twice.")
            arguments[key] = self._value(1)
            if not self._skip(","):
                self._expect(")")
                break
        return ParsedCallText(name, arguments), self.at

    def _value(self, deep: int) -> Any:
        if deep >= DEEPEST:
            raise Malformed(f"The call nests more than {DEEPEST} levels deep.")
        if self._skip("["):
            return self._list(deep + 1)
        if self._skip("{"):
            return self._mapping(deep + 1)
        self._blank()
        if self._text[self.at : self.at + 1] in ("'", '"'):
            return self._string()
        if number := _NUMBER.match(self._text, self.at, self.stop):
            self.at = number.end()
            return _number(number.group())
        word = self._match(_KEYWORD, "a literal")
        if word not in _WORDS:
            raise Malformed(f"{word!r} is not a literal: write strings in quotes.")
        return _WORDS[word]

    def _list(self, deep: int) -> list[Any]:
        result: list[Any] = []
        if self._skip("]"):
            return result
        while True:
            result.append(self._value(deep))
            if not self._skip(","):
                self._expect("]")
                return result
            if self.trailing and self._skip("]"):
                return result

    def _mapping(self, deep: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if self._skip("}"):
            return result
        while True:
            self._blank()
            key = self._string()
            self._expect(":")
            if key in result:
                raise Malformed(f"The key {key!r} appears twice.")
            result[key] = self._value(deep)
            if not self._skip(","):
                self._expect("}")
                return result
            if self.trailing and self._skip("}"):
                return result

    def _string(self) -> str:
        found = self._match(self._strings, "a string in quotes")
        value = _ESCAPE.sub(_unescaped, found[1:-1])
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise Malformed("A string escapes half of a surrogate pair, which is not a character.")
        return value

    def _in_open_string(self) -> bool:
        quote = self._text[self.at : self.at + 1]
        return quote in ("'", '"') and not self._strings.match(self._text, self.at, self.stop)

    def _blank(self) -> None:
        self.at = self._after_blank()

    def _after_blank(self) -> int:
        blank = _BLANK.match(self._text, self.at, self.stop)
        return blank.end() if blank else self.at

    def _skip(self, text: str) -> bool:
        self._blank()
        here = self._text.startswith(text, self.at, self.stop)
        self.at += len(text) if here else 0
        return here

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise self._unexpected(repr(text))

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        self._blank()
        found = pattern.match(self._text, self.at, self.stop)
        if found is None:
            raise self._unexpected(what)
        self.at = found.end()
        return found.group()

    def _unexpected(self, expected: str) -> Malformed:
        found = self._text[self.at : min(self.stop, self.at + 20)]
        return Malformed(f"The calls {f'have {shortened(found)}' if found else 'end'} where {expected} belongs.")


def _number(text: str) -> int | float:
    if len(text) > _LONGEST_NUMBER:
        raise Malformed(f"A number has more than {_LONGEST_NUMBER} digits.")
    if set(text) & set(".eE"):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise Malformed(f"{text} is too large a number.")
        return value
    return int(text)


def _unescaped(match: re.Match[str]) -> str:
    escape = match.group()[1:]
    if escape in _SIMPLE:
        return _SIMPLE[escape]
    if len(escape) > 1 and (point := int(escape[1:], 16)) < 0x110000:
        return chr(point)
    raise Malformed(f"A string has the unknown escape {match.group()!r}.")
