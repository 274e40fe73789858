"""Parsing plain text by a schema."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsing.families import plain
from tito_core.parsing.call_text import Malformed
from tito_core.parsing.formats.python_literals import literal
from tito_core.parsing.typed_value import typed_value, types_of

KINDS = {"integer": st.integers(), "number": st.floats(allow_nan=False, allow_infinity=False), "boolean": st.booleans()}


def read(text: str, schema: Any, **whole: Any) -> Any:
    return typed_value(text, {"look": {"properties": {"at": schema}, **whole}}, "look", "at")


@given(st.text())
def test_strings_are_the_unchanged_text(text: str) -> None:
    assert read(text, {"type": "string"}) == text
    assert read(text, {}) == text
    assert typed_value(text, {}, "look", "at") == text
    assert typed_value(text, {"look": {}}, "look", "at") == text


@given(st.data())
def test_other_values_are_json(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    value = data.draw(KINDS[kind])
    assert read(plain(value), {"type": kind}) == value
    assert read(str(value), {"type": kind}) == value  # as Jinja writes it
    assert type(read(f" {plain(value)}\n", {"type": kind})) is type(value)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "number"}, 5),
        ("5.0", {"type": "integer"}, 5.0),
        ("3.5", {"type": "float"}, 3.5),
        ("7", {"type": "int"}, 7),
        ("true", {"type": "bool"}, True),
        ("[1]", {"type": ["list", "None"]}, [1]),
        ("7", {"type": "str"}, "7"),
        ("7", {"type": "file"}, "7"),
        ("None", {"type": "null"}, None),
        ("[1, {}]", {"type": "array"}, [1, {}]),
        ("{}", {"properties": {}}, {}),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nil", {"type": ["string", "null"]}, "nil"),
        ("5", {"oneOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("5.5", {"type": ["string", "integer"]}, "5.5"),
        ('"5"', {"type": ["string", "integer"]}, '"5"'),
        ("{", {"type": ["string", "object"]}, "{"),
        ("5", {"anyOf": [{"type": "integer"}, {}]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, True]}, "5"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("b", {"enum": [1, "b"]}, "b"),
        ("3", {"const": 3}, 3),
        ("3", {"$ref": "#/$defs/size"}, 3),
        ("3", {"$ref": "#/$defs/a~1b"}, 3),
        ("3", {"$ref": "#/$defs/nobody"}, "3"),
        ("3", {"$ref": "elsewhere"}, "3"),
        ("3", {"$ref": "#/$defs/loop"}, "3"),
        ("3", {"enum": []}, "3"),
        ("3", {"type": []}, "3"),
    ],
)
def test_types_come_from_the_schema(text: str, schema: Any, value: Any) -> None:
    defs = {"size": {"type": "integer"}, "a/b": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    found = read(text, schema, **{"$defs": defs})
    assert (found, type(found)) == (value, type(value))


def test_further_properties_have_their_schema_too() -> None:
    tools = {"look": {"properties": {}, "additionalProperties": {"type": "integer"}}}
    assert typed_value("5", tools, "look", "at") == 5
    assert typed_value("5", {"look": {"additionalProperties": True}}, "look", "at") == "5"


@pytest.mark.parametrize(
    ("text", "schema", "reason"),
    [
        ("five", {"type": "integer"}, "value of 'at' is not valid JSON"),
        ("5.5", {"type": "integer"}, "'at' must be of type integer, not '5.5'"),
        ("true", {"type": "integer"}, "must be of type integer"),
        ("1", {"type": "boolean"}, "must be of type boolean"),
        ("TRUE", {"type": "boolean"}, "not valid JSON"),
        ("3.5", {"const": 3}, "must be of type integer"),
        ("3.5", {"enum": [3]}, "must be of type integer"),
        ("5", {"type": ["array", "object"]}, "must be of type array or object"),
        ('"5"', {"type": "integer"}, "must be of type integer"),
        ("", {"type": "integer"}, "not valid JSON"),
        ("Infinity", {"type": "number"}, "Infinity is not a JSON number"),
        ('{"a": 1, "a": 2}', {"type": "object"}, "'a' appears twice"),
        ("x" * 500, {"enum": [1]}, "not valid JSON"),
        ("[" * 200 + "]" * 200, {"type": "array"}, "nests more than 100"),
    ],
)
def test_a_value_of_another_type_is_malformed(text: str, schema: Any, reason: str) -> None:
    with pytest.raises(Malformed) as caught:
        read(text, schema)
    assert reason in caught.value.reason
    assert caught.value.name == "look"
    assert len(caught.value.reason) < 300


def test_schemas_without_a_type_allow_anything() -> None:
    assert types_of({"description": "a"}, {}) is None
    assert types_of({"type": ["integer", "null"]}, {}) == {"integer", "null"}


def chain(links: int) -> dict[str, Any]:
    """Return definitions: each refers to the one before, the first is an integer."""
    return {"0": {"type": "integer"}, **{str(n): {"$ref": f"#/$defs/{n - 1}"} for n in range(1, links)}}


def test_references_are_followed_as_deep_as_is_allowed_and_no_deeper() -> None:
    whole = {"$defs": chain(30)}
    assert types_of({"$ref": "#/$defs/19"}, whole) == {"integer"}
    assert types_of({"$ref": "#/$defs/20"}, whole) is None
    nested: Any = {"type": "integer"}
    for _ in range(20):
        nested = {"anyOf": [nested]}
    assert types_of(nested, {}) == {"integer"}
    assert types_of({"oneOf": [nested]}, {}) is None


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, {"integer", "null"}),
        ({"$ref": "#/$defs/either"}, {"integer", "null"}),
        ({"$ref": "#/$defs/a~0b"}, {"integer"}),
        ({"$ref": "#/$defs/size/type"}, None),
        ({"$ref": "#/$defs/size/type/more"}, None),
        ({"anyOf": "no list", "enum": [5]}, {"integer"}),
        ({"anyOf": [], "oneOf": [{"type": "null"}]}, {"null"}),
        ({"enum": "no list", "const": 5}, {"integer"}),
        ({"enum": [b"no JSON", 5]}, {"integer"}),
        ({"enum": [b"no JSON"]}, None),
        ({"const": b"no JSON"}, None),
        ({"const": b"no JSON", "properties": {}}, {"object"}),
    ],
)
def test_what_a_schema_allows(schema: Any, types: set[str] | None) -> None:
    size = {"type": "integer"}
    whole = {"$defs": {"size": size, "a~b": size, "either": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}}}
    assert types_of(schema, whole) == types


def test_a_string_is_not_decoded_even_where_it_could_be() -> None:
    assert read("None", {"type": "string"}) == "None"
    assert read(" 5 ", {"type": ["string"]}) == " 5 "


@pytest.mark.parametrize(
    ("text", "value"),
    [("['p', 2]", ["p", 2]), ("{'a': [None, True]}", {"a": [None, True]}), ("[]", []), ('["p", 2]', ["p", 2])],
)
def test_lists_and_objects_may_stand_as_python_writes_them(text: str, value: object) -> None:
    tools = {"look": {"properties": {"at": {"type": ["array", "object"]}}}}
    assert typed_value(text, tools, "look", "at", literal) == value


@pytest.mark.parametrize("text", ["['p', 2,]", "{'a': 1,}", "['p' 2]", "['p', 2", "['p'] x", "(1, 2)", "[x]", "7"])
def test_what_python_would_not_write_is_malformed(text: str) -> None:
    tools = {"look": {"properties": {"at": {"type": ["array", "object"]}}}}
    with pytest.raises(Malformed):
        typed_value(text, tools, "look", "at", literal)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("string", {"string"}),
        (["string", "null"], {"string", "null"}),
        (
            ["string", "integer", "number", "boolean", "array", "object", "null"],
            {"string", "integer", "number", "boolean", "array", "object", "null"},
        ),
        (["string", "what"], None),
        ([], None),
        (5, None),
    ],
)
def test_named_types_restrict_a_value_unless_one_is_unknown(kind: Any, expected: Any) -> None:
    assert types_of({"type": kind}, {}) == expected
