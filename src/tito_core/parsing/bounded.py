"""Rewrite JSON Schemas so that XGrammar samples valid JSON for strings of bounded length.

XGrammar 0.2.7 and 0.2.8 allow raw control characters, such as a tab, in a string with a `minLength` or `maxLength`.
That is invalid JSON. With the same bound as a `pattern` they do not. Neither form allows escapes in such a string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tito_core.parsing.completion import JsonSchema

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_IN_ORDER = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_ALONE = frozenset({"items", "additionalProperties", "contains"})
_LENGTHS = ("minLength", "maxLength")


def bounded_by_pattern(schema: JsonSchema) -> dict[str, Any]:
    """Return a copy of a schema, and of all schemas in it, with the lengths of strings as patterns."""
    result = {key: _inside(key, value) for key, value in schema.items()}
    kinds = schema.get("type")
    is_string = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    free = not any(key in schema for key in ("pattern", "format", "enum", "const"))
    if is_string and free and any(key in schema for key in _LENGTHS):
        least, most = (result.pop(key, default) for key, default in zip(_LENGTHS, (0, ""), strict=True))
        result["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'
    return result


def _inside(key: str, value: Any) -> Any:
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: _schema(one) for name, one in value.items()}
    if key in _IN_ORDER and isinstance(value, list):
        return [_schema(one) for one in value]
    return _schema(value) if key in _ALONE else value


def _schema(value: Any) -> Any:
    return bounded_by_pattern(value) if isinstance(value, Mapping) else value
