"""Rewrite a tool's schema so that XGrammar allows every value that the schema allows.

XGrammar 0.2.7 and 0.2.8 read some keywords more narrowly than JSON Schema means them, and then a policy cannot say
what the tool allows. Such keywords are widened or left out; the arguments are held against the schema afterwards. What
they do, as seen with both versions:

- An object without "additionalProperties" has no others, a list without "items" none after "prefixItems", and a schema
  without "type" allows only objects where it has "properties" (lists where it has "items").
- A required name without a schema of its own makes the object impossible.
- A "pattern" matches the whole string, and a string with a pattern, a format or a length allows no escapes, so that a
  quotation mark or a line break could not be written.
- A name in "patternProperties" matches as a whole, too; "contains" and "propertyNames" forbid everything else.
- "oneOf" means "anyOf", as it has to where the options were widened: several of them may then allow a value.
- An impossible schema (`false`), or a reference that leads nowhere, is an error.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from tito_core.parsing.schema import KINDS, ToolSchema, rewritten

_DROPPED = (
    *("minLength", "maxLength", "format", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("contains", "minContains", "maxContains", "unevaluatedItems", "additionalItems", "not", "if", "then", "else"),
    *("dependentSchemas", "dependentRequired", "dependencies", "multipleOf", "$dynamicRef", "$recursiveRef"),
)
_OBJECTS = ("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties")
_LISTS = ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OTHERS = (*_BOUNDS, "pattern", "minLength", "maxLength")
_UNTYPED = frozenset(KINDS - {"integer"})
_PLAIN_PATTERN = re.compile(
    r"\^(?:[A-Za-z0-9 _@#%&=:;,<>~-]|\\[dw.+*?$()\[\]{}-]|\[[A-Za-z0-9 _@#%&=:;,.<>~-]+\]|[(){}+*?])*\$"
)
"""Patterns of characters that JSON never escapes, for a whole string."""
_DEFINITIONS = "-"


def for_grammar(schema: ToolSchema, name: str | None = None) -> dict[str, Any]:
    """Return the schema of a tool's arguments, or of the argument `name`, for XGrammar."""
    wide = rewritten({key: value for key, value in schema.json.items() if key != "$id"}, _wider)
    if name is None:
        return _with_references(wide, wide, "#") or {"type": "object"}
    one = wide.get("properties", {}).get(name)
    if not isinstance(one, dict):  # it is declared elsewhere
        return {"type": sorted(schema.kinds((name,))), "additionalProperties": True, "items": True}
    root = {"$defs": {_DEFINITIONS: wide}}
    moved: dict[str, Any] = _with_references({**root, **one}, root, f"#/$defs/{_DEFINITIONS}")
    return moved


def _wider(schema: dict[str, Any]) -> dict[str, Any]:
    typed = [key for key in ("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf") if key in schema]
    if not typed and any(key in schema for key in (*_OBJECTS, *_LISTS, *_OTHERS)):
        schema["type"] = sorted(_UNTYPED)
    _open_object(schema)
    _open_list(schema)
    if not _PLAIN_PATTERN.fullmatch(str(schema.get("pattern", ""))):
        schema.pop("pattern", None)
    if "number" in schema.get("type", ()):
        for key in _BOUNDS:
            schema.pop(key, None)  # its decimals are limited
    if "oneOf" in schema:  # options that are wider now may hold together
        schema.setdefault("anyOf", schema["oneOf"])
        del schema["oneOf"]
    for union in ("anyOf", "allOf"):
        if union in schema and not (kept := [one for one in schema[union] if one is not False]):
            del schema[union]
        elif union in schema:
            schema[union] = kept
    if schema.get("enum") == []:
        del schema["enum"]
    if "$id" in schema:
        return {}  # it changes what references mean
    return {key: value for key, value in schema.items() if key not in _DROPPED}


def _open_object(schema: dict[str, Any]) -> None:
    """Allow all names that JSON Schema allows."""
    others = schema.get("additionalProperties", True)
    unevaluated = schema.pop("unevaluatedProperties", True)
    inner = any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas"))
    if "additionalProperties" not in schema and not inner:
        others = unevaluated
    if "patternProperties" in schema:
        others = True
    properties = {key: value for key, value in schema.get("properties", {}).items() if value is not False}
    if "properties" in schema:
        schema["properties"] = properties
    if missing := [key for key in schema.get("required", ()) if key not in properties]:
        schema["properties"] = {**properties, **dict.fromkeys(missing, True if others is False else others)}
    kinds = schema.get("type", ())
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in schema:
        schema["additionalProperties"] = others


def _open_list(schema: dict[str, Any]) -> None:
    """Allow all items that JSON Schema allows."""
    if isinstance(schema.get("items"), list):  # before draft 2020-12
        schema["prefixItems"] = schema.pop("items")
        schema["items"] = schema.get("additionalItems", True)
    kinds = schema.get("type", ())
    if (kinds == "array" or (isinstance(kinds, list) and "array" in kinds)) and "items" not in schema:
        schema["items"] = True
    if schema.get("items") is False and "prefixItems" not in schema:
        schema.pop("items")
        schema["maxItems"] = 0
    if "prefixItems" in schema:
        schema["prefixItems"] = [True if one is False else one for one in schema["prefixItems"]]


def _with_references(schema: dict[str, Any], root: dict[str, Any], base: str) -> Any:
    """Return a schema whose references begin with `base` in place of `#`; those that lead nowhere are left out."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        reference = one.pop("$ref", None)
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            pointer = base + reference[1:]
            if _leads(pointer, root):
                one["$ref"] = pointer
        return one

    return rewritten(schema, change)


def _leads(pointer: str, root: Any) -> bool:
    """Return whether a JSON pointer in a fragment leads to a schema."""
    found = root
    for step in pointer.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return False
    return isinstance(found, dict)
