"""Generated JSON Schemas of tools, each with arguments that it allows: the arguments come first.

Every keyword that JSON Schema composes with is put at every place. Draws come from a `random.Random`, so that
Hypothesis (`st.randoms()`) and an engine's environment without it can use them. `jsonschema` judges them alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema

Json = Any
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("null", {"type": "null"}),
    ("boolean", {"type": "boolean"}),
    ("integer", {"type": "integer"}),
    ("string", {"type": "string"}),
    ("array", {"type": "array", "items": {"type": "null"}, "minItems": 9}),
    ("object", {"type": "object", "required": ["zz_none"], "additionalProperties": False}),
)
WORDS = ("x", "two words", "5", "true", "null", "[1]", "{}", "None", "é漢", "a\nb", '"q"', "", " ", "-1.5")


def is_valid(schema: Json, value: Json) -> bool:
    """Judge a value, as the library alone does."""
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def value(rng: Random, name: Callable[[], str], deep: int = 2) -> Json:
    """Draw a value; `name` draws the names of members."""
    kind = rng.randrange(8 if deep else 6)
    if kind == 6:
        return [value(rng, name, deep - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {name(): value(rng, name, deep - 1) for _ in range(rng.randrange(3))}
    return (None, rng.random() < 0.5, rng.randrange(-9, 99), rng.choice([0.5, -1.25, 2e10]), rng.choice(WORDS), "w")[
        kind
    ]


class Schemas:
    """Draws schemas that allow given values; `definitions` are what they refer to."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.definitions: dict[str, Json] = {}

    def of(self, given: Json, deep: int = 3) -> Json:
        """Return a schema that allows a value."""
        if self.rng.random() < 0.05:
            return self.rng.choice([{}, {"description": "Anything."}])
        plain = self._plain(given, deep)
        for _ in range(self.rng.choice([0, 0, 1, 1, 2]) if deep else 0):
            plain = self._composed(plain, given)
        return plain

    def _plain(self, given: Json, deep: int) -> dict[str, Any]:
        rng = self.rng
        if rng.random() < 0.1:
            return rng.choice([{"enum": [given, "other", 7]}, {"const": given}, {"enum": [given]}])
        if isinstance(given, dict):
            return self.members(given, deep - 1)
        if isinstance(given, list):
            return self._items(given, deep - 1)
        if isinstance(given, str):
            size = {"minLength": len(given), "maxLength": len(given) + 2} if rng.random() < 0.3 else {}
            return {"type": "string", **size, **({"pattern": re.escape(given[:1])} if rng.random() < 0.2 else {})}
        if given is None or isinstance(given, bool):
            return {"type": "null" if given is None else "boolean"}
        bounds = {"minimum": given - 1, "exclusiveMaximum": given + 3} if rng.random() < 0.3 else {}
        return {"type": "integer" if isinstance(given, int) and rng.random() < 0.7 else "number", **bounds}

    def _items(self, given: list[Json], deep: int) -> dict[str, Any]:
        rng, each = self.rng, [self.of(item, deep) for item in given]
        kind = rng.randrange(5)
        if kind == 0:
            return {"type": "array"}
        if kind == 1:
            rest = {"items": False} if rng.random() < 0.5 else {"unevaluatedItems": False}
            return {"type": "array", "prefixItems": each, **rest} if each else {"type": "array", "maxItems": 0}
        if kind == 2 and each:
            return {"type": "array", "prefixItems": each[:1], "items": {"anyOf": each[1:] or [{}]}}
        if kind == 3 and each:
            return {"type": "array", "contains": each[0], "minItems": 1}
        return {"type": "array", "items": {"anyOf": each}} if each else {"type": "array", "items": {"type": "integer"}}

    def members(self, given: dict[str, Json], deep: int = 2) -> dict[str, Any]:
        """Return a schema of an object, whose members it declares in any of the ways that there are."""
        rng, properties = self.rng, {key: self.of(item, deep) for key, item in given.items()}
        schema: dict[str, Any] = {"type": "object"}
        required = {"required": [key for key in given if rng.random() < 0.6]}
        kind = rng.randrange(7)
        if kind == 0 and given:
            return {
                **schema,
                "patternProperties": {f"^{re.escape(k)}$": one for k, one in properties.items()},
                **required,
            }
        if kind == 1 and given:
            return {**schema, "additionalProperties": {"anyOf": list(properties.values())}, **required}
        if kind == 2:
            parts = [{"properties": {key: one}} for key, one in properties.items()]
            return {**schema, "allOf": parts or [{}], **required, "unevaluatedProperties": False}
        if kind == 3 and given:
            first = next(iter(given))
            condition = {"properties": {first: {"const": given[first]}}, "required": [first]}
            return {**schema, "if": condition, "then": {"properties": properties}, "else": False}
        if kind == 4 and given:
            return {**schema, "dependentSchemas": {key: {"properties": {key: one}} for key, one in properties.items()}}
        closed = {"additionalProperties": False} if rng.random() < 0.4 else {}
        more = {"never": {"type": "integer"}} if rng.random() < 0.3 else {}
        return {**schema, "properties": {**properties, **more}, **required, **closed}

    def _composed(self, schema: dict[str, Any], given: Json) -> dict[str, Any]:
        rng = self.rng
        others = [other for _, other in OTHERS if not is_valid(other, given)]
        other = rng.choice(others)
        name = f"d{len(self.definitions)}"
        kind = rng.randrange(11)
        if kind <= 2:
            self.definitions[name] = schema
            reference = {"$ref": f"#/$defs/{name}"}
            return (reference, {"allOf": [reference], "description": "d"}, {**reference, "title": "t", "not": other})[
                kind
            ]
        return (
            {"allOf": [schema]},
            {"allOf": [schema, {"not": other}]},
            {"anyOf": rng.sample([schema, other], 2)},
            {"oneOf": rng.sample([schema, other, {"not": {}}], 3)},
            {"if": schema, "then": {}, "else": False},
            {"if": other, "then": False, "else": schema},
            {"anyOf": [{"$ref": "#/$defs/nothing"}, schema]} if rng.random() < 0.2 else {"anyOf": [schema, other]},
            {"$dynamicRef": f"#{name}"} if self._anchored(name, schema) else schema,
        )[kind - 3]

    def _anchored(self, name: str, schema: dict[str, Any]) -> bool:
        self.definitions[name] = {"$dynamicAnchor": name, **schema}
        return True


def tool(rng: Random, name: Callable[[], str], deep: int = 2) -> tuple[dict[str, Any], dict[str, Json]]:
    """Draw a tool's schema and arguments that it allows."""
    schemas = Schemas(rng)
    given = {name(): value(rng, name, deep) for _ in range(rng.randrange(4))}
    schema = schemas.members(given)
    if rng.random() < 0.2:
        schema = {"type": "object", "allOf": [schema]}
    if rng.random() < 0.2:
        other = {"type": "object", "required": ["zz_none"]}
        schema = {"type": "object", "anyOf": [other, schema]}
    whole = {**schema, "$defs": {**schemas.definitions, "nothing": {}}}
    return whole, given
