"""Strict parsing of calls and arguments in JSON."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Set
from typing import Any, NoReturn

from tito_core.parsing.call_text import DEEPEST, Malformed, ParsedCallText, shortened

_BLANK = re.compile(r"\s*")
_USUAL = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_OTHER = "parameters"
"""Key of the arguments, loosely in any format: SGLang reads it in all its formats of JSON objects, vLLM in Phi-4's."""
_DECODER = json.JSONDecoder()


def json_end(text: str, start: int) -> int:
    """Return the end of the JSON value at `start`, or `start` if there is none."""
    try:
        return _DECODER.raw_decode(text, after_blank(text, start))[1]
    except (ValueError, RecursionError):
        return start


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
    sampled = _last(text, head.end()) if head else _member(text, arguments)
    return ParsedCallText(name, value[arguments], written, sampled, loose)


def _last(text: str, start: int) -> str:
    """Return the text of an object's last member."""
    return text.rstrip()[start:-1].rstrip()


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


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        children = (
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        )
        level = [child for of_one in children for child in of_one if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _is_text(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
