"""The lengths of strings in a grammar's schema become patterns; nothing else changes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_core.parsing.bounded import bounded_by_pattern

PATTERN = r'^[^"\\\x00-\x1f]{%s}$'


@pytest.mark.parametrize(
    ("schema", "lengths"),
    [
        ({"type": "string", "maxLength": 3}, "0,3"),
        ({"type": "string", "minLength": 2}, "2,"),
        ({"type": ["null", "string"], "minLength": 1, "maxLength": 1}, "1,1"),
    ],
)
def test_a_length_is_a_pattern(schema: Any, lengths: str) -> None:
    pattern = PATTERN % lengths
    assert bounded_by_pattern(schema) == {"type": schema["type"], "pattern": pattern}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "pattern": "^a+$", "maxLength": 3},
        {"type": "string", "format": "date", "minLength": 3},
        {"type": "string", "enum": ["a"], "maxLength": 3},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        {"type": "object", "properties": {"maxLength": {"type": "integer"}, "pattern": {"type": "string"}}},
        {"const": {"type": "string", "maxLength": 3}},
        {"type": "object", "default": {"items": {"type": "string", "maxLength": 3}}},
        {"type": "array", "items": True},
    ],
)
def test_other_schemas_and_values_are_unchanged(schema: Any) -> None:
    assert bounded_by_pattern(schema) == schema


def test_nested_schemas_are_found() -> None:
    short: Any = {"type": "string", "maxLength": 3}
    schema = {
        "type": "object",
        "properties": {"a": short, "b": {"type": "array", "items": short, "prefixItems": [short], "contains": short}},
        "patternProperties": {"^x": short},
        "additionalProperties": short,
        "anyOf": [short, {"oneOf": [short], "allOf": [short]}],
        "$defs": {"d": short},
        "definitions": {"d": short},
    }
    before = json.dumps(schema)
    found = json.dumps(bounded_by_pattern(schema))
    assert found.count("maxLength") == 0
    assert found.count("pattern") - found.count("patternProperties") == before.count("maxLength") == 11
    assert json.dumps(schema) == before


@given(st.text(), st.integers(0, 4), st.integers(4, 9))
def test_text_that_matches_the_pattern_is_json_of_that_length(text: str, least: int, most: int) -> None:
    schema = {"type": "string", "minLength": least, "maxLength": most}
    taken = re.fullmatch(bounded_by_pattern(schema)["pattern"].removeprefix("^").removesuffix("$"), text)
    if taken:
        jsonschema.validate(json.loads(f'"{text}"'), schema)
    else:
        fits = least <= len(text) <= most
        assert not fits or re.search(r'["\\\x00-\x1f]', text)
