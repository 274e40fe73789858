"""Arguments written as plain text: the tool's schema decides what each value is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsing.families import plain
from tito_core.parsing.call_values import reading
from tito_core.parsing.schema import MOST_READINGS, Choice, ToolSchema, ToolSchemaError, check_tools, meaning

KINDS = {"integer": st.integers(), "number": st.floats(allow_nan=False, allow_infinity=False), "boolean": st.booleans()}
EITHER = {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}
DEFS = {"size": {"type": "integer"}, "a/b": {"type": "integer"}, "either": EITHER}


def read(text: str, schema: Any, **whole: Any) -> Any:
    fit = meaning({"properties": {"at": schema}, "$defs": DEFS, **whole}).fit({"at": reading(text, lambda: False)})
    if fit.arguments is None:
        raise ValueError("; ".join(fit.faults))
    return fit.arguments["at"]


@given(st.text())
def test_strings_are_the_unchanged_text(text: str) -> None:
    assert read(text, {"type": "string"}) == text


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
        ("7", {"type": "any"}, 7),
        ("None", {"type": "null"}, None),
        ("{}", {"properties": {}}, {}),
        ("null", {"type": ["string", "null"]}, None),
        ("nil", {"type": ["string", "null"]}, "nil"),
        ("null", {"type": "integer", "nullable": True}, None),
        ("null", {"$ref": "#/$defs/size", "nullable": True}, None),
        ("5.5", {"type": ["string", "integer"]}, "5.5"),
        ('"5"', {"type": ["string", "integer"]}, '"5"'),
        ("{", {"type": ["string", "object"]}, "{"),
        ("5", {"anyOf": [{"type": "integer"}, {}]}, 5),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("b", {"enum": [1, "b"]}, "b"),
        ("3", {"$ref": "#/$defs/a~1b"}, 3),
        ("3", {"$ref": "#/$defs/nothing"}, 3),
        ("3", {"allOf": [{"$ref": "#/$defs/size"}], "description": "d"}, 3),
        ("3", {"allOf": [{"type": "string"}, {"$ref": "#/$defs/nothing"}]}, "3"),
        ("3", {"oneOf": [{"$ref": "#/$defs/nothing"}, {"$ref": "#/$defs/nobody"}]}, 3),
        ("5", {"not": {"type": "integer"}}, "5"),
        ("5", {"if": {"type": "integer"}, "then": False}, "5"),
        ("5", {"type": "string", "pattern": "(?=x)"}, "5"),
        ("5", {}, 5),
        ("so", {}, "so"),
    ],
)
def test_the_first_reading_that_fits_is_taken(text: str, schema: Any, value: Any) -> None:
    found = read(text, schema)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "whole",
    [
        {"additionalProperties": {"type": "string"}},
        {"patternProperties": {"^mo": {"type": "string"}}},
        {"allOf": [{"properties": {"more": {"type": "string"}}}]},
        {"unevaluatedProperties": {"type": "string"}},
        {"if": {"properties": {"at": {"const": 1}}}, "then": {"properties": {"more": {"type": "string"}}}},
        {"dependentSchemas": {"at": {"properties": {"more": {"type": "string"}}}}},
        {"anyOf": [{"properties": {"more": {"type": "string"}}}]},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"more": {"type": "string"}}}}},
    ],
)
def test_a_member_is_read_by_every_keyword_that_reaches_it(whole: Any) -> None:
    schema = meaning({"properties": {"at": {"type": "integer"}}, **whole})
    assert schema.fit({"at": reading("1"), "more": reading("1")}).arguments == {"at": 1, "more": "1"}


def test_a_long_list_of_strings_that_spell_numbers_is_read() -> None:
    items = [Choice((number, str(number))) for number in range(5 * MOST_READINGS)]
    schema = meaning({"properties": {"all": {"items": {"type": "string"}}}})
    assert schema.fit({"all": items}).arguments == {"all": [str(number) for number in range(5 * MOST_READINGS)]}


@pytest.mark.parametrize(
    ("text", "schema", "reason"),
    [
        ("five", {"type": "integer"}, r"at: 'five' is not of type 'integer' \(the value is not valid JSON"),
        ("5.5", {"type": "integer"}, "5.5 is not of type"),
        ("true", {"type": "integer"}, "True is not of type"),
        ("TRUE", {"type": "boolean"}, "not valid JSON"),
        ("3.5", {"const": 3}, "3 was expected"),
        ("", {"type": "integer"}, "not valid JSON"),
        ("Infinity", {"type": "number"}, "Infinity is not a JSON number"),
        ('{"a": 1, "a": 2}', {"type": "object"}, "'a' appears twice"),
        ("x" * 500, {"enum": [1]}, "not valid JSON"),
        ("[" * 200 + "]" * 200, {"type": "array"}, "nests more than 100"),
        ('"a"', {"enum": ["a"]}, "is not one of"),
    ],
)
def test_a_value_of_no_fitting_reading_has_its_fault(text: str, schema: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        read(text, schema)
    assert len(str(caught.value)) < 500


def test_a_schema_that_is_not_json_is_refused_with_the_tool() -> None:
    with pytest.raises(ToolSchemaError, match="tool 'look' is not JSON"):
        check_tools({"look": {"properties": {"at": {"enum": [{1, 2}.__iter__]}}}})


def test_a_schema_is_compiled_once_for_equal_tools_and_1_is_not_true() -> None:
    one, other = ({"properties": {"at": {"const": 1}}} for _ in range(2))
    assert meaning(one) is meaning(other)
    assert meaning({"properties": {"at": {"const": True}}}) is not meaning(one)


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"$ref": "#/$defs/either"}, {"integer", "null"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"not": {}}, {"enum": [1, None]}]}, {"integer"}),
        ({"oneOf": [{"const": "a"}, {"type": "array"}]}, {"string", "array"}),
        ({"type": "number"}, {"integer", "number"}),
        ({"$ref": "#/properties/at"}, None),
        ({"properties": {}}, None),
        ({"$ref": "#/$defs/nothing", "type": "null"}, {"null"}),
        ({"$id": "https://example.com/y", "type": "null"}, None),
    ],
)
def test_the_types_that_a_member_can_have(schema: Any, kinds: Any) -> None:
    found = ToolSchema({"properties": {"at": schema}, "$defs": dict(DEFS)}).kinds(("at",))
    assert found == (kinds or {"null", "boolean", "integer", "number", "string", "array", "object"})
