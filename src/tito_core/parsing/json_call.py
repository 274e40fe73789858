"""One call as a JSON object, `{"name": ..., "arguments": {...}}`, read strictly."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from tito_core.parsing.parsed import CallStatus, ParsedCall

DEEPEST = 100
"""Levels of lists and objects that a call may hold; deeper ones overflow the stack of whoever copies them."""


_BLANK = re.compile(r"\s*")


def json_end(text: str, start: int) -> int:
    """Give the end of the JSON value at `start`, or `start` when there is none."""
    blank = _BLANK.match(text, start)
    try:
        return json.JSONDecoder().raw_decode(text, blank.end() if blank else start)[1]
    except (ValueError, RecursionError):
        return start


def parse_json_call(body: str, raw: str, start: int, stop: int) -> ParsedCall:
    """Read a call.

    Args:
        body: Text between the tags.
        raw: The call with its tags.
        start: Its first token within the completion.
        stop: One past its last token.
    """

    def malformed(reason: str, name: str | None = None) -> ParsedCall:
        return ParsedCall(CallStatus.MALFORMED, name, None, raw, start, stop, reason)

    try:
        value = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except ValueError as error:
        return malformed(f"The call is not valid JSON: {error}.")
    except RecursionError:
        return malformed(f"The call nests more than {DEEPEST} levels deep.")
    if not isinstance(value, dict):
        return malformed(f"The call must be a JSON object, not {type(value).__name__}.")
    if _too_deep(value):
        return malformed(f"The call nests more than {DEEPEST} levels deep.")
    if "\\u" in body and not _is_text(value):
        return malformed("The call escapes half of a surrogate pair, which is no character.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return malformed('The call has no "name" string.')
    if not isinstance(value.get("arguments"), dict):
        return malformed('The call has no "arguments" object.', name)
    if extra := set(value) - {"name", "arguments"}:
        return malformed(f"The call has unexpected keys: {', '.join(sorted(extra)[:5])}.", name)
    return ParsedCall(CallStatus.OK, name, value["arguments"], raw, start, stop)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


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


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        children = (item.values() if isinstance(item, dict) else item for item in level)
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
