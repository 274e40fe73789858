"""A tool's schema in other drafts and dialects, held against `jsonschema`'s own validators of the drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsing import schemas
from tito_core.parsing.dialects import matches
from tito_core.parsing.schema import ToolSchema

DRAFTS: dict[str, Any] = {
    "http://json-schema.org/draft-04/schema#": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema#": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema#": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
}
randoms = st.randoms(use_true_random=False)


def copied(schema: Any) -> Any:
    return json.loads(json.dumps(schema))  # without shared parts


def inner(schema: Any) -> Iterator[Any]:
    """Yield the schemas inside a schema, inner ones first, and the schema."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("properties", "patternProperties", "$defs", "dependentSchemas", "dependencies"):
                parts = [*value.values()]
            else:
                parts = value if isinstance(value, list) else [value]
            for part in parts if key not in ("enum", "const", "required") else ():
                yield from inner(part)
        yield schema


def in_draft(schema: Any, draft: str) -> Any:
    """Write a generated schema as an older draft does."""
    for one in inner(schema):
        if "prefixItems" in one:
            one["additionalItems"], one["items"] = one.pop("items", {}), one.pop("prefixItems")
        if "dependentSchemas" in one and "2019" not in draft:
            one["dependencies"] = one.pop("dependentSchemas")
        if "draft-04" not in draft:
            continue
        if "exclusiveMaximum" in one:
            one["maximum"], one["exclusiveMaximum"] = one["exclusiveMaximum"], True
        for key in [key for key, value in one.items() if value is False and not key.startswith("additional")]:
            one[key] = {"not": {}}
        one["required"] = one.get("required") or ["zz"]  # draft 4 has no empty list
        if one["required"] == ["zz"]:
            del one["required"]
    return {"$schema": draft, **schema}


def others(rng: Random, arguments: dict[str, Any], names: Callable[[], str]) -> Iterator[dict[str, Any]]:
    yield arguments
    for key in [*arguments, names()]:
        yield {**arguments, key: schemas.value(rng, names)}
        yield {name: value for name, value in arguments.items() if name != key}


@pytest.mark.parametrize("draft", DRAFTS)
@given(rng=randoms)
def test_a_schema_of_an_older_draft_allows_what_it_means(draft: str, rng: Random) -> None:
    names = lambda: rng.choice("ab")  # noqa: E731
    whole, arguments = schemas.tool(rng, names)
    schema = in_draft(copied(whole), draft)
    DRAFTS[draft].check_schema(schema)
    meant, judge = ToolSchema(schema), DRAFTS[draft](schema)
    for each in others(rng, arguments, names):
        assert (meant.faults(each) == ()) == judge.is_valid(each), (schema, each, meant.json)


IDLE: tuple[tuple[str, Any], ...] = (
    *(("description", None), ("title", 5), ("examples", "5"), ("format", 7), ("readOnly", "yes"), ("default", {})),
    *(("enum", None), ("pattern", None), ("minimum", None), ("properties", None), ("anyOf", None), ("type", "any")),
    *(("x-more", {"type": 5}), ("exclusiveMinimum", False), ("nullable", False), ("required", False)),
    ("$schema", "http://["),
)
NONSENSE: tuple[tuple[str, Any], ...] = (
    *(("type", "file"), ("type", []), ("minLength", "5"), ("enum", "x"), ("required", "x"), ("properties", [])),
    *(("items", "string"), ("anyOf", []), ("allOf", [5]), ("not", "x"), ("pattern", "(?=x)"), ("pattern", 5)),
    *(("$ref", "https://example.com/x"), ("$ref", 5), ("$ref", "#/properties/a/b/0"), ("$ref", "#/required")),
    *(("patternProperties", {"(a)\\1": False}), ("dependencies", 5), ("additionalProperties", "no")),
)


@given(rng=randoms)
def test_what_says_nothing_changes_nothing_and_refuses_no_call(rng: Random) -> None:
    names = lambda: rng.choice("ab")  # noqa: E731
    whole, arguments = schemas.tool(rng, names)
    idle, broken = copied(whole), copied(whole)
    for one in [*inner(idle)]:
        key, value = rng.choice(IDLE)
        one.setdefault(key, value)
    meant = ToolSchema(idle)
    for each in others(rng, arguments, names):
        assert (meant.faults(each) == ()) == schemas.is_valid(whole, each), (idle, each, meant.json)
    key, value = rng.choice(NONSENSE)
    rng.choice([*inner(broken)])[key] = value
    meant = ToolSchema(broken)
    assert meant.faults(arguments) == (), (broken, meant.json)
    assert key in meant.notes


@pytest.mark.parametrize(
    ("schema", "fits", "refused"),
    [
        ({"minimum": 0, "exclusiveMinimum": True}, 1, 0),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 2]),
        ({"properties": {"b": {"required": True}}, "required": True}, {"b": 1}, {}),
        ({"dependencies": {"b": ["c"]}}, {"b": 1, "c": 1}, {"b": 1}),
        ({"dependencies": {"b": {"required": ["c"]}}}, {"b": 1, "c": 1}, {"b": 1}),
        ({"type": "string", "nullable": True}, None, 5),
        ({"multipleOf": 0.01}, 19.99, 19.995),
        ({"multipleOf": 0.5}, 10**400, 0.3),
        ({"$ref": "#/components/schemas/Word"}, "x", 5),
        ({"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False}, {"x-a": 1}, {"a": 1}),
    ],
)
def test_what_has_one_meaning_is_checked(schema: Any, fits: Any, refused: Any) -> None:
    words = {"Word": {"$ref": "#/components/schemas/Text"}, "Text": {"type": "str"}}
    meant = ToolSchema({"properties": {"a": schema}, "components": {"schemas": words}})
    assert (meant.faults({"a": fits}), meant.notes.count("Not checked")) == ((), 0)
    assert meant.faults({"a": refused})


def doubled(keyword: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a schema in which each of 28 levels refers to the next one twice."""
    levels = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2, **(more or {})} for i in range(28)}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**levels, "d28": {"type": "integer"}}}


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
def test_levels_of_doubled_references_are_compared_once(keyword: str) -> None:
    meant = ToolSchema(doubled(keyword))
    assert meant.faults({"a": 5}) == ()
    assert "'x' is not" in meant.faults({"a": "x"})[0]


def nested(levels: int) -> dict[str, Any]:
    one: dict[str, Any] = {"properties": {"a": {}}}
    for _ in range(levels):
        one = {"allOf": [one], "unevaluatedProperties": False}
    return one


def test_a_comparison_ends_after_a_number_of_steps() -> None:
    meant = ToolSchema(nested(40))
    assert "combine too often" in meant.faults({"a": {"b": 1}})[0]
    many = [{"b": i} for i in range(2000)]
    assert "combine too often" in ToolSchema({"properties": {"a": {"uniqueItems": True}}}).faults({"a": many})[0]


@pytest.mark.parametrize("pattern", [r"^([a-z0-9]+\.?)+$", "(a*)*b", "(a|aa)+$"])
def test_a_pattern_takes_linear_time(pattern: str) -> None:
    assert not matches(pattern, "a" * 100_000 + "!")
    name = ToolSchema({"patternProperties": {pattern: False}, "additionalProperties": {"unevaluatedProperties": False}})
    assert name.faults({"a" * 100_000 + "!": 5}) == ()
    assert "Not checked: unevaluatedProperties" in name.notes


@pytest.mark.parametrize("pattern", ["[a&&b]", "[[a]]", "[a--z]", "(?!x)", r"(a)\1"])
def test_a_pattern_that_the_library_reads_its_own_way_is_not_checked(pattern: str) -> None:
    meant = ToolSchema({"properties": {"a": {"pattern": pattern}}})
    assert meant.faults({"a": "!"}) == ()
    assert "Not checked: pattern" in meant.notes
