"""Parse arguments written as plain text by the tool's schema (Qwen3-Coder, GLM, MiniMax)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tito_core.parsing.call_text import Malformed, shortened
from tito_core.parsing.completion import JsonSchema, Tools
from tito_core.parsing.json_call import json_value

_PYTHON = {"True": True, "False": False, "None": None}
"""As Jinja writes them: the templates of Qwen3-Coder and Nemotron render scalars this way."""

_ALIASES = {
    **{"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "list": "array", "dict": "object", "none": "null"},
}
"""Names of types that JSON Schema does not have, but that tools' schemas use."""

_DEEPEST_REFERENCE = 20
_JSON_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
_OF_VALUE: dict[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}


def parameter_schema(tools: Tools, name: str, key: str) -> tuple[JsonSchema, JsonSchema]:
    """Return the schema of one parameter and of the whole tool; an unknown one is empty."""
    whole = tools.get(name, {})
    properties = whole.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = whole.get("additionalProperties")
    return (schema if isinstance(schema, Mapping) else {}), whole


def typed_value(text: str, tools: Tools, name: str, key: str, literal: Callable[[str], Any] | None = None) -> Any:
    """Parse the value of parameter `key` of tool `name`; see `value_of`."""
    return value_of(text, *parameter_schema(tools, name, key), name, key, literal)


def value_of(
    text: str,
    schema: JsonSchema,
    whole: JsonSchema,
    name: str,
    key: str,
    literal: Callable[[str], Any] | None = None,
) -> Any:
    """Parse a value by its schema.

    If the schema allows only a string, or does not give a type, the value is the text, including blanks. Otherwise it
    is JSON, or `True`, `False` or `None`; if the schema also allows a string, other text is that string.

    Args:
        text: The value as written.
        schema: The parameter's schema.
        whole: The tool's schema, in which local references are looked up.
        name: The tool's name.
        key: The parameter's name.
        literal: Parses text that is not JSON, in families whose templates write lists and objects as Python does;
            raises `Malformed`.

    Raises:
        Malformed: The text is not a value of an allowed type.
    """
    types = types_of(schema, whole)
    if types is None or types == {"string"}:
        return text
    try:
        value = _PYTHON[text.strip()] if text.strip() in _PYTHON else json_value(text, f"value of {key!r}", name)
    except Malformed as fault:
        if "string" in types:
            return text
        if literal is None:
            raise
        try:
            value = literal(text)
        except Malformed:
            raise fault from None
    if isinstance(value, str) and "string" in types:
        return text  # strings are written without quotes, so these quotes belong to the value
    if any(is_of_type(value, kind) for kind in types):
        return value
    if "string" in types:
        return text
    allowed = " or ".join(sorted(types))
    raise Malformed(f"The value of {key!r} must be of type {allowed}, not {shortened(text)}.", name)


def types_of(schema: JsonSchema, whole: JsonSchema, deep: int = 0) -> set[str] | None:
    """Return the JSON types that a schema allows; None if it does not restrict the type.

    Args:
        schema: The parameter's schema.
        whole: The tool's schema, in which local references are looked up.
        deep: The number of references and unions followed so far.
    """
    if deep > _DEEPEST_REFERENCE:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        found = _looked_up(reference, whole)
        return None if found is None else types_of(found, whole, deep + 1)
    kind = schema.get("type")
    if kinds := [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []:
        named = {_ALIASES.get(str(each).lower(), str(each).lower()) for each in kinds}
        return named if named <= _JSON_TYPES else None
    for union in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(union), list) and options:
            each = [types_of(option, whole, deep + 1) if isinstance(option, Mapping) else None for option in options]
            return None if None in each else {name for names in each for name in names or ()}
    if isinstance(values := schema.get("enum"), list) and values:
        return {_OF_VALUE[type(value)][0] for value in values if type(value) in _OF_VALUE} or None
    if "const" in schema and type(schema["const"]) in _OF_VALUE:
        return {_OF_VALUE[type(schema["const"])][0]}
    if isinstance(schema.get("properties"), Mapping):
        return {"object"}
    return None


def resolved(schema: JsonSchema, whole: JsonSchema) -> JsonSchema:
    """Return the schema that local references lead to; the empty schema if they lead nowhere."""
    for _ in range(_DEEPEST_REFERENCE):
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _looked_up(reference, whole) or {}
    return {}


def is_of_type(value: Any, kind: str) -> bool:
    """Return whether a value has a JSON type."""
    if isinstance(value, float) and value.is_integer() and kind == "integer":
        return True  # an integer in JSON Schema
    return kind in _OF_VALUE[type(value)]


def _looked_up(reference: str, whole: JsonSchema) -> JsonSchema | None:
    if not reference.startswith("#/"):
        return None
    found: Any = whole
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
