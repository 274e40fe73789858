"""A tool's schema, in whichever dialect it is written, as JSON Schema 2020-12 that can be checked.

Servers of MCP and converters write other drafts and dialects. What has one meaning is translated: older drafts'
tuples, bounds, `dependencies` and `id`, OpenAPI's `nullable`, names of types such as "str", `required: true` at a
property, null in place of a keyword. What says nothing that can be checked is left out: its place then allows
everything. Both are noted. Annotations restrict nothing and are not noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

from jsonschema import Draft3Validator, Draft4Validator, Draft6Validator, Draft7Validator, Draft202012Validator
from jsonschema.validators import validator_for
from pydantic import StringConstraints, TypeAdapter
from pydantic_core import SchemaError as PatternError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
IN_ORDER = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
ALONE = frozenset(
    {"items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"}
    | {"propertyNames", "not", "if", "then", "else", "contentSchema"}
)
"""Where a schema holds schemas: by name, in a list, or alone."""
IN_PLACE = ("allOf", "anyOf", "oneOf")
_VALUES = frozenset({"const", "enum", "default", "examples", "example", "required", "type", "dependentRequired"})
"""Keywords that hold values, which are no schemas."""
_ALIASES = {
    **{"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "list": "array", "dict": "object", "none": "null"},
}
"""Names of types that JSON Schema does not have, but that tools' schemas use. "any" is dropped."""
_LATEST = Draft202012Validator.VALIDATORS
_THIRD = ("divisibleBy", "extends", "disallow")
"""Keywords of draft 3 that are not translated."""
_OTHER_FORM = {"required", "exclusiveMinimum", "exclusiveMaximum"}
"""Keywords that the first drafts have in another form."""
_ALONE_REFERENCES = (Draft3Validator, Draft4Validator, Draft6Validator, Draft7Validator)
"""Drafts in which nothing beside a "$ref" counts."""
_OLD = (*_THIRD, "additionalItems", "dependencies", "$recursiveRef", "nullable")
_ASSERTIONS = {*_LATEST, *_OLD, "then", "else", "schema"} - {"format"}
_HOLDS_REST = frozenset({"properties", "patternProperties", "prefixItems"})
_REST = ("additionalProperties", "unevaluatedProperties", "items", "unevaluatedItems")
_ASIDE = frozenset({*_VALUES, "$defs", "definitions"})
_REFERENCES = frozenset({"$ref", "$dynamicRef"})
_POINTER = re.compile(r'"\$ref": "#/([^"]+)"')
_DEFINED = re.compile(r"#/(\$defs|definitions)/[^/]+")
_REQUIRED = "tito: required"
UNKNOWN = "tito: it says nothing that can be checked"
_LONGEST = 60
_META = Draft202012Validator(Draft202012Validator.META_SCHEMA)
_CLASS = re.compile(r"\\.|\[\^?\]?((?:\\.|[^\]\\])*)\]|.", re.DOTALL)
_SET_SIGNS = re.compile(r"(?<!\\)\[|&&|--|~~")
_PLAIN_PATTERN = re.compile(r"(?:[^\\*+?{(|]|\\.)*")
"""Patterns without a choice, which take linear time in any library."""

Change = Callable[[dict[str, Any]], dict[str, Any]]


def rewritten(schema: Any, change: Change, others: Set[str] = frozenset()) -> Any:
    """Return a copy of a schema in which `change` has replaced each schema, inner ones first.

    `others` are further keywords with a schema in them.
    """
    if not isinstance(schema, Mapping):
        return schema
    return change({key: _inside(key, value, change, others) for key, value in schema.items()})


def _inside(key: str, value: Any, change: Change, others: Set[str]) -> Any:
    if key in BY_NAME and isinstance(value, Mapping):
        return {name: rewritten(one, change, others) for name, one in value.items()}
    if (key in IN_ORDER or key == "items") and isinstance(value, list):
        return [rewritten(one, change, others) for one in value]
    return rewritten(value, change, others) if key in ALONE or key in others else value


@lru_cache(1024)
def _compiled(pattern: str) -> TypeAdapter[str] | None:
    """Compile a pattern for Rust's library, which takes linear time; None if it cannot read it, or only its own way.

    Look-around and references to groups are what it cannot read; sets inside a class what only it reads.
    """
    try:
        compiled = TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])
    except PatternError:
        return None
    return None if any(map(_SET_SIGNS.search, _CLASS.findall(pattern))) else compiled


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern occurs in a text, in time linear in the text; True if it cannot be read."""
    compiled = _compiled(pattern)
    try:
        return compiled is None or compiled.validate_python(text) is not None
    except ValueError:
        return False


class Translated:
    """A schema in JSON Schema 2020-12.

    Args:
        schema: The schema, in the draft that its "$schema" names, else 2020-12 or OpenAPI's.

    Raises:
        RecursionError: It nests too deep.

    Attributes:
        json: The schema, without "$schema" and what cannot be checked.
        draft: The validator of the draft that it names.
    """

    def __init__(self, schema: Any) -> None:
        self._read: dict[str, None] = {}
        self._left_out: dict[str, None] = {}
        self._backtracks = False
        named = schema.get("$schema") if isinstance(schema, dict) else None
        self.draft: Any = Draft202012Validator
        with suppress(ValueError):  # an address that is none
            self.draft = validator_for({"$schema": str(named)}, default=self.draft)
        self._absent = {"$schema", *(_LATEST.keys() - self.draft.VALIDATORS.keys() - _OTHER_FORM)}
        whole = schema if isinstance(schema, dict) else self._schema("schema", schema)
        pointers = _POINTER.findall(json.dumps(whole))  # as OpenAPI's "#/components/schemas/X"
        self._others = {step for pointer in pointers for step in pointer.split("/")} - _VALUES
        self.json: dict[str, Any] = rewritten(whole, self._canonical, self._others)
        if not _META.is_valid(self.json):
            self.json = rewritten(self.json, self._pruned, self._others)
        if self._backtracks:  # `jsonschema` would match these names
            self.json = rewritten(self.json, lambda one: self._without(one, ["unevaluatedProperties"]))
        self._leave_dangling()
        if self._left_out:
            self.json = rewritten(self.json, self._without_opposites)

    @property
    def notes(self) -> str:
        """What was translated and what is not checked, as sentences; empty for a usual schema."""
        read = f"Read as JSON Schema 2020-12 means it: {', '.join(self._read)}." if self._read else ""
        left = f"Not checked: {', '.join(self._left_out)}." if self._left_out else ""
        return f"{read} {left}".strip()

    def _canonical(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Translate one schema; its inner ones are translated already."""
        schema = {key: value for key, value in schema.items() if key not in self._absent}
        if self.draft in _ALONE_REFERENCES and isinstance(schema.get("$ref"), str):
            schema = {key: schema[key] for key in ("$ref", "$defs", "definitions") if key in schema}
        found = {key: value for key, value in schema.items() if value is not None or key == "const"}
        for translate in (_type, _nullable, _tuple, _dependencies, _bounds, _required, _identity):
            translate(found)
        self._read |= dict.fromkeys(
            key for key in schema if key in _ASSERTIONS and found.get(key) is not schema[key] and key != "const"
        )
        bad = [key for key in _THIRD if self.draft is Draft3Validator and key in found]
        if isinstance(pattern := found.get("pattern"), str) and _compiled(pattern) is None:
            bad.append("pattern")
        if isinstance(patterns := found.get("patternProperties"), dict):
            bad += ["patternProperties"] * any(_compiled(one) is None for one in patterns)
            self._backtracks |= not all(map(_PLAIN_PATTERN.fullmatch, patterns))
        return self._without(found, bad)

    def _pruned(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Leave out what is not JSON Schema 2020-12."""
        bad = []
        for key, value in schema.items():
            if key in BY_NAME and isinstance(value, dict):
                schema[key] = {name: self._schema(key, one) for name, one in value.items()}
            elif key in IN_ORDER and isinstance(value, list) and value:
                schema[key] = [self._schema(key, one) for one in value]
            elif key in ALONE:
                schema[key] = self._schema(key, value)
            elif key in BY_NAME or key in IN_ORDER or not _META.is_valid({key: value}):
                bad.append(key)
        return self._without(schema, bad)

    def _schema(self, key: str, value: Any) -> Any:
        """Return a schema, or in place of a value that is none one that allows everything."""
        return value if isinstance(value, dict | bool) else self._without({key: value}, [key])

    def _without(self, schema: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        """Leave keywords out, with those that speak of the rest, and note those that are no annotations."""
        keys = [key for key in keys if key in schema]
        keys += [key for key in _REST if key in schema and not _HOLDS_REST.isdisjoint(keys)]
        left_out = [key for key in keys if key in _ASSERTIONS or key in BY_NAME]
        self._left_out |= dict.fromkeys(f"{key} {json.dumps(schema[key])[:_LONGEST]}" for key in left_out)
        kept = {key: value for key, value in schema.items() if key not in keys}
        return {**kept, "$comment": UNKNOWN} if left_out else kept

    def _without_opposites(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Leave out what a schema says by the opposite of one that is unknown, or may refer to an unknown one."""
        written = {key: json.dumps({key: value}) for key, value in schema.items() if key not in _ASIDE}
        inside = {key for key, text in written.items() if any(sign in text for sign in (UNKNOWN, '"$ref"', '"$dyn'))}
        if "oneOf" in inside:
            self._left_out["oneOf as more than anyOf"] = None
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": schema.pop("oneOf")}]
        opposites = [*(inside & {"not", "if"}), *(["maxContains"] if "contains" in inside else [])]
        return self._without(schema, [*opposites, *(["unevaluatedProperties", "unevaluatedItems"] if inside else [])])

    def _leave_dangling(self) -> None:
        """Leave out references that lead out of the schema, nowhere, or to something else than a schema."""
        root = DRAFT202012.create_resource(self.json)
        waiting, seen = [(root, Registry().resolver_with_root(root))], set()
        while waiting:
            resource, resolver = waiting.pop()
            contents = resource.contents
            if not isinstance(contents, dict) or id(contents) in seen:
                continue
            seen.add(id(contents))
            for key in _REFERENCES & contents.keys():
                try:
                    resolved = resolver.lookup(contents[key])
                    leads = bool(_DEFINED.fullmatch(contents[key])) or _META.is_valid(resolved.contents)
                except (Unresolvable, LookupError, TypeError, ValueError, AttributeError):
                    leads = False
                if leads:
                    waiting.append((DRAFT202012.create_resource(resolved.contents), resolved.resolver))
                else:
                    kept = self._without(contents, [key])
                    contents.clear()
                    contents.update(kept)
            waiting += ((inner, resolver.in_subresource(inner)) for inner in resource.subresources())


def _type(schema: dict[str, Any]) -> None:
    """Use the usual names of types."""
    if not isinstance(kinds := schema.get("type"), str | list):
        return
    listed = [kinds] if isinstance(kinds, str) else kinds
    names = [_ALIASES.get(each.lower(), each.lower()) if isinstance(each, str) else each for each in listed]
    if "any" in names:
        del schema["type"]
    elif names != listed:
        schema["type"] = names[0] if isinstance(kinds, str) else names


def _nullable(schema: dict[str, Any]) -> None:
    """Allow null, as OpenAPI 3.0 means `nullable`."""
    if schema.get("nullable") is not True:
        return
    del schema["nullable"]
    if isinstance(kinds := schema.get("type"), str | list):
        listed = [kinds] if isinstance(kinds, str) else kinds
        schema["type"] = listed if "null" in listed else [*listed, "null"]
        return
    inner = {key: schema.pop(key) for key in ("$ref", *IN_PLACE) if key in schema}
    if inner:
        schema["anyOf"] = [inner, {"type": "null"}]


def _tuple(schema: dict[str, Any]) -> None:
    """Use "prefixItems" for a list's first items, as since 2020-12."""
    rest = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        first = schema.pop("items")
        schema |= ({"prefixItems": first} if first else {}) | ({} if rest is None else {"items": rest})


def _dependencies(schema: dict[str, Any]) -> None:
    """Use two keywords for "dependencies", as since 2019-09."""
    if isinstance(needs := schema.get("dependencies"), dict):
        del schema["dependencies"]
        names = {key: [need] if isinstance(need, str) else need for key, need in needs.items()}
        for keyword, kind in (("dependentRequired", list), ("dependentSchemas", dict | bool)):
            if found := {key: need for key, need in names.items() if isinstance(need, kind)}:
                schema[keyword] = {**schema.get(keyword, {}), **found}


def _bounds(schema: dict[str, Any]) -> None:
    """Use a number for an exclusive bound, where draft 4 and OpenAPI 3.0 have a flag."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(flag), bool) and schema.pop(flag) and bound in schema:
            schema[flag] = schema.pop(bound)


def _required(schema: dict[str, Any]) -> None:
    """List required names where the object is, and not at each property, as draft 3 and many authors do."""
    if isinstance(schema.get("required"), bool):
        schema[_REQUIRED] = schema.pop("required")
    properties = schema.get("properties")
    listed = schema.get("required", [])
    if isinstance(properties, dict) and isinstance(listed, list):
        inner = {
            name: one.pop(_REQUIRED) for name, one in properties.items() if isinstance(one, dict) and _REQUIRED in one
        }
        if names := [name for name, needed in inner.items() if needed and name not in listed]:
            schema["required"] = [*listed, *names]


def _identity(schema: dict[str, Any]) -> None:
    """Use today's keywords for a schema's address, and for a reference to the whole."""
    if isinstance(anchor := schema.get("$id"), str) and anchor.startswith("#"):
        schema["$anchor"] = schema.pop("$id")[1:]
    if "$recursiveRef" in schema:
        schema.setdefault("$ref", schema.pop("$recursiveRef"))
