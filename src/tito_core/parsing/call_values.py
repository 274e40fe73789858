"""The text of one call as values: JSON, Python literals, and values that are written as plain text.

Nothing is repaired or evaluated (law 9): what is not exactly one value is `Malformed`, with a sentence for the policy.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from tito_core.parsing.schema import Choice

DEEPEST = 100
"""Maximum number of nested levels of lists and objects in a call; copying deeper ones overflows Python's stack."""
_NAME = re.compile(r"\w[\w./-]*")
_BLANK = re.compile(r"\s*")
_USUAL = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_OTHER = "parameters"
"""Key of the arguments, loosely in any format: SGLang reads it in all its formats of JSON objects, vLLM in Phi-4's."""
_KEY = re.compile(r"[^\s()\[\]{}=,'\"]+")
"""Templates write the names of tools and arguments as they are, also those that Python does not allow."""
_KEYWORD = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?(?![\w.])")
_STRING = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
_STRING_BREAKS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_SIMPLE = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""As Jinja writes them: the templates of Qwen3-Coder and Nemotron render scalars this way."""
_WORDS = {**_PYTHON_WORDS, "true": True, "false": False, "null": None}
_LONGEST_NUMBER = 4000
"""Digits; Python does not convert integers of more than 4300."""


class Malformed(Exception):
    """The text is not a valid call. It is reported and never repaired (law 9).

    Attributes:
        reason: A sentence for the policy.
        name: The tool's name, if the text gives it without doubt.
    """

    def __init__(self, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name


@dataclass(frozen=True, slots=True)
class ParsedCallText:
    """A valid call.

    Attributes:
        name: The tool's name.
        arguments: The decoded arguments.
        id: The call id that the policy wrote, in formats that have one.
        text: The arguments as sampled, in formats that write them as JSON.
        loose: How the call differs from the family's documentation, as a sentence; empty if it does not. A loose call
            still has exactly one reading.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    text: str | None = None
    loose: str = ""


def is_valid_name(name: str) -> bool:
    """Return whether a tool's name is valid where a format writes it without quotes."""
    return _NAME.fullmatch(name) is not None


def shortened(text: str, longest: int = 60) -> str:
    """Return the text in quotes, cut to `longest` characters."""
    return repr(text if len(text) <= longest else text[:longest] + "...")


def after_blank(text: str, start: int) -> int:
    """Return the first character at or after `start` that is not blank."""
    blank = _BLANK.match(text, start)
    return blank.end() if blank else start


def json_value(text: str, what: str = "call", name: str | None = None) -> Any:
    """Parse one JSON value.

    Args:
        text: The value; blanks around it are allowed.
        what: What the value is, for the error.
        name: The tool's name, if known.

    Raises:
        Malformed: The text is not JSON, repeats a key, has NaN or an infinity, escapes half of a surrogate pair, or
            nests more than `DEEPEST` levels.
    """
    try:
        value = _STRICT.decode(text)
    except ValueError as error:
        raise Malformed(f"The {what} is not valid JSON: {error}.", name) from None
    except RecursionError:
        raise Malformed(f"The {what} nests more than {DEEPEST} levels deep.", name) from None
    if _too_deep(value):
        raise Malformed(f"The {what} nests more than {DEEPEST} levels deep.", name)
    if "\\u" in text and not _is_text(value):
        raise Malformed(f"The {what} escapes half of a surrogate pair, which is not a character.", name)
    return value


def json_arguments(text: str, name: str) -> dict[str, Any]:
    """Parse the arguments of the tool `name`.

    Raises:
        Malformed: The text is not one JSON object.
    """
    value = json_value(text, "arguments object", name)
    if not isinstance(value, dict):
        raise Malformed(f"The arguments must be a JSON object, not {type(value).__name__}.", name)
    return value


def json_end(text: str, start: int) -> int:
    """Return the end of the JSON value at `start`, or `start` if there is none."""
    try:
        return _DECODER.raw_decode(text, after_blank(text, start))[1]
    except (ValueError, RecursionError):
        return start


def call_of_arguments(name: str, text: str, call_id: str | None = None) -> ParsedCallText:
    """Return the call of a known tool from the JSON of its arguments.

    Raises:
        Malformed: The text is not one JSON object.
    """
    return ParsedCallText(name, json_arguments(text, name), call_id, text.strip())


def call_of_object(
    value: Any,
    text: str,
    arguments: str = "arguments",
    call_id: str | None = None,
    allowed: Set[str] = frozenset(),
    loosely: Set[str] = frozenset(),
    name_key: str = "name",
) -> ParsedCallText:
    """Return the call in a decoded JSON value; it is loose if it has "parameters" in place of `arguments`.

    Args:
        value: The decoded value.
        text: The same value as JSON.
        arguments: Key of the arguments.
        call_id: Key of the call's id, in a format that can have one (Mistral).
        allowed: Other keys that a call can have. A "type" here or in `loosely` must be "function".
        loosely: Other keys that make the call loose.
        name_key: Key of the name.

    Raises:
        Malformed: The value is not such an object, or has other keys.
    """
    if not isinstance(value, dict):
        raise Malformed(f"The call must be a JSON object, not {type(value).__name__}.")
    name = value.get(name_key)
    if not isinstance(name, str) or not name:
        raise Malformed(f'The call has no "{name_key}" string.')
    loose = ""
    if arguments not in value and isinstance(value.get(_OTHER), dict):
        loose, arguments = f'The call has no "{arguments}" object, but "{_OTHER}".', _OTHER
    if not isinstance(value.get(arguments), dict):
        raise Malformed(f'The call has no "{arguments}" object.', name)
    extra = set(value) - {name_key, arguments, call_id} - allowed
    loose = f"The call has unexpected keys: {', '.join(sorted(extra)[:5])}." if extra else loose
    if extra - loosely:
        raise Malformed(loose, name)
    if "type" in value and value["type"] != "function":
        raise Malformed(f'The call\'s "type" must be "function", not {shortened(repr(value["type"]))}.', name)
    written = None if call_id is None else value.get(call_id)
    if written is not None and not isinstance(written, str):
        raise Malformed(f"The call's {call_id!r} must be a string, not {type(written).__name__}.", name)
    head = _USUAL.match(text) if len(value) == 2 else None  # then only a brace follows the arguments
    sampled = text.rstrip()[head.end() : -1].rstrip() if head else _member(text, arguments)
    return ParsedCallText(name, value[arguments], written, sampled, loose)


def _member(text: str, key: str) -> str:
    """Return the text of one member of a valid JSON object that has it."""
    at = after_blank(text, 0) + 1
    while True:
        name, at = _DECODER.raw_decode(text, after_blank(text, at))
        start = after_blank(text, after_blank(text, at) + 1)
        at = json_end(text, start)
        if name == key:
            return text[start:at]
        at = after_blank(text, at) + 1


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} is too large a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} appears twice")
    return result


_DECODER = json.JSONDecoder()
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


def _too_deep(value: Any) -> bool:
    kinds = (dict, list)  # of the decoder: no others have items
    level = [value] if type(value) in kinds else []
    for _ in range(DEEPEST):
        children = [item.values() if type(item) is dict else item for item in level]
        level = [child for of_one in children for child in of_one if type(child) in kinds]
        if not level:
            return False
    return True


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class PythonReader:
    """Reads calls, or one literal, as Python writes them, in characters `start` to `stop` of a text.

    `ast.parse` cannot do this: it refuses the names of arguments that Python does not allow, changes what the policy
    wrote (it normalises names and line breaks, joins adjacent strings, drops comments and warns of unknown escapes),
    and does not tell what is missing, or whether more text could complete a call that the token limit cut off.

    Attributes:
        at: The next character.
        stop: One past the last character.
        lines: Whether each call is on its own line, without brackets and commas.
        trailing: Whether a comma may follow the last item of a list, an object or a call.
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
        self._skip_blank()
        opens = self._text.startswith(("'", '"'), self.at)
        return self.at >= self.stop or (opens and not self._strings.match(self._text, self.at, self.stop))

    def calls(self) -> list[tuple[ParsedCallText, int]]:
        """Return the calls of `[name(keyword=literal, ...), ...]`, each with the character after it.

        Raises:
            Malformed: The text is not such a list.
        """
        if not self.lines:
            self._expect("[")
        calls = [self._call()]
        while self._follows():
            calls.append(self._call())
        return calls

    def value(self, depth: int = 1) -> Any:
        """Return one literal as `repr` writes it, or a word of JSON; `depth` counts the levels around it.

        Raises:
            Malformed: No literal comes next.
        """
        if depth >= DEEPEST:
            raise Malformed(f"The call nests more than {DEEPEST} levels deep.")
        if self._skip("["):
            return [self.value(depth + 1) for _ in self._items("]")]
        if self._skip("{"):
            return self._members("}", "key", ":", depth + 1)
        if self._text.startswith(("'", '"'), self.at, self.stop):
            return self._string()
        if number := _NUMBER.match(self._text, self.at, self.stop):
            self.at = number.end()
            return _number(number.group())
        word = self._match(_KEYWORD, "a literal")
        if word not in _WORDS:
            raise Malformed(f"{word!r} is not a literal: write strings in quotes.")
        return _WORDS[word]

    def _call(self) -> tuple[ParsedCallText, int]:
        name = self._match(_NAME, "a tool's name")
        self._expect("(")
        return ParsedCallText(name, self._members(")", "keyword", "=", 1)), self.at

    def _follows(self) -> bool:
        """Take what separates two calls, or ends them; return whether another call follows."""
        if not self.lines:
            follows = self._skip(",")
            if not follows:
                self._expect("]")
            return follows
        last = self.at
        self._skip_blank()
        if self.at < self.stop and "\n" not in self._text[last : self.at]:
            raise self._unexpected("a line break")
        return self.at < self.stop

    def _members(self, close: str, what: str, after: str, depth: int) -> dict[str, Any]:
        """Take members up to the bracket `close`: a keyword or a key in quotes, the text `after` it, and a value."""
        result: dict[str, Any] = {}
        for _ in self._items(close):
            key = self._match(_KEY, "a keyword") if what == "keyword" else self._string()
            self._expect(after)
            if key in result:
                raise Malformed(f"The {what} {key!r} appears twice.")
            result[key] = self.value(depth)
        return result

    def _items(self, close: str) -> Iterator[None]:
        """Yield before each item up to the bracket `close`; take the commas between them, and the bracket."""
        if self._skip(close):
            return
        yield
        while self._skip(","):
            if self.trailing and self._skip(close):
                return
            yield
        self._expect(close)

    def _string(self) -> str:
        value = _ESCAPE.sub(_unescaped, self._match(self._strings, "a string in quotes")[1:-1])
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise Malformed("A string escapes half of a surrogate pair, which is not a character.")
        return value

    def _skip_blank(self) -> None:
        self.at = min(after_blank(self._text, self.at), self.stop)

    def _skip(self, text: str) -> bool:
        self._skip_blank()
        here = self._text.startswith(text, self.at, self.stop)
        self.at += len(text) if here else 0
        return here

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise self._unexpected(repr(text))

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        self._skip_blank()
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


def reading(text: str, in_python: Callable[[], bool] = lambda: False) -> Choice:
    """Return what a value may be: JSON, or `True`, `False` or `None`; else the text itself, including blanks.

    Text between double quotes is text: strings are written without quotes, so these quotes belong to the value.

    Args:
        text: The value as written.
        in_python: Whether the family's template writes lists and objects as Python does; called only for text that may
            be one and is not JSON.
    """
    word = text.strip()
    try:
        value = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else json_value(text, "value")
    except Malformed as fault:
        if word[:1] in ("[", "{") and in_python():
            with suppress(Malformed):
                reader = PythonReader(word, 0, len(word), trailing=False)
                value = reader.value()
                if reader.at == reader.stop:
                    return Choice((value, text))
        return Choice((text,), fault.reason[:1].lower() + fault.reason[1:].rstrip("."))
    return Choice((text,)) if isinstance(value, str) else Choice((value, text))


def element(text: str) -> Choice:
    """Return what an element without inner ones may be (MiniMax M3); a blank one is also an empty list or object."""
    found = reading(text)
    return found if text.strip() else Choice((*found.options, [], {}), found.why)


def nested(members: list[tuple[str, Any]], item: str) -> Choice:
    """Return what an element with inner ones may be: a list if all have the name `item`; an object if no name repeats.

    Raises:
        Malformed: It can be neither.
    """
    names = Counter(name for name, _ in members)
    options: list[Any] = [[value for _, value in members]] if set(names) == {item} else []
    [(repeated, times)] = names.most_common(1)
    if times == 1:
        options.append(dict(members))
    elif not options:
        raise Malformed(f"The element {repeated!r} appears twice.")
    return Choice(tuple(options))
