"""Calls against their tools' schemas, for every format: OK means that the arguments fit; what fits is OK."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from parsing import schemas
from parsing.families import CALL_FAMILIES, NAMES, Family, ids_of, parse
from support.budget import PROVE
from support.byte_level import byte_level
from tito_core.parsing import CallStatus, get_tool_parser
from tito_core.parsing.schema import ToolSchema

OK, MALFORMED = CallStatus.OK, CallStatus.MALFORMED


def names_for(family: Family, rng: Random) -> Callable[[], str]:
    return lambda: rng.choice("abz_") + rng.choice("ab")


def same(one: Any, other: Any) -> bool:
    """Compare as JSON, in which 1 is not true, and 1.0 is 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def reads_as(written: Any, read: Any) -> bool:
    """Return whether a value and what was read differ only in strings that spell another value, or the reverse."""
    if isinstance(written, dict) and isinstance(read, dict):
        return written.keys() == read.keys() and all(reads_as(written[key], read[key]) for key in written)
    if isinstance(written, list) and isinstance(read, list) and written:
        return len(written) == len(read) and all(map(reads_as, written, read))
    if same(written, read):
        return True
    empty = ("", " ", [], {})
    return (
        (isinstance(written, str) and same(spelled(written), read))
        or (isinstance(read, str) and same(spelled(read), written))
        or (written in empty and read in empty)  # an empty element of MiniMax M3
    )


def spelled(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(text)  # as Seed-OSS and Step 3 write lists
        return text


BARE_ENUMS = ("gemma4", "functiongemma")
"""Formats whose strings need tags, unless the schema lists them: there `null` can be the listed word."""


def outcome(family: Family, schema: Any, arguments: dict[str, Any]) -> str:
    """Write a call as the format does, parse it, and hold the result against the schema; return what happened."""
    text = family.render([("look", arguments)])
    turn = parse(family, ids_of(family, text), tools={"look": schema})
    [call] = turn.calls
    valid = schemas.is_valid(schema, arguments)
    if call.status == OK:
        assert schemas.is_valid(schema, call.arguments), (schema, text, call.arguments)
        if same(dict(call.arguments or {}), arguments):
            return "equal"
        # Another reading of the same text, which the schema allows too and which comes first.
        bare = family.name in BARE_ENUMS and any(key in json.dumps(schema) for key in ('"enum"', '"const"'))
        assert family.typed or bare, (schema, text, call)
        assert reads_as(arguments, dict(call.arguments or {})), (schema, text, call)
        return "first of several readings" if valid else "another reading fits"
    assert (call.status, call.arguments) == (MALFORMED, None)
    assert not valid, (schema, text, call.reason)
    assert "The arguments do not fit the tool's schema" in call.reason
    return "refused"


# What the arguments say in JSON is held to the schema alike in every format.
READ = [name for name in NAMES if PROVE or name in ("hermes", "gpt_oss") or not CALL_FAMILIES[name].json_arguments]


@pytest.mark.parametrize("name", READ)
def test_a_call_is_ok_if_and_only_if_it_fits_a_generated_schema(name: str) -> None:
    family = CALL_FAMILIES[name]

    @settings(max_examples=15)
    @given(st.randoms(use_true_random=False))
    def check(rng: Random) -> None:
        names = names_for(family, rng)
        schema, arguments = schemas.tool(rng, names)
        assert outcome(family, schema, arguments) != "refused"
        for key in [*arguments, names()]:
            outcome(family, schema, {**arguments, key: schemas.value(rng, names)})
        if arguments:
            outcome(family, schema, dict(list(arguments.items())[1:]))

    check()


OPEN = {"type": "object", "properties": {"a>b": {"type": "string"}, "c": {"type": "integer"}}}
BOTH = {"type": "object", "properties": {"a>b": {"type": "string"}, "a": {"type": "string"}}}


@pytest.mark.parametrize(
    "name", ["seed_oss", "mimo", "qwen3_coder", "glm45", "minimax_m2", "deepseek_v4", "muse_glimmer"]
)
def test_a_declared_name_may_hold_the_sign_that_ends_a_name(name: str) -> None:
    assert outcome(CALL_FAMILIES[name], OPEN, {"a>b": "x", "c": 5}) == "equal"
    if name in ("seed_oss", "mimo"):  # "a" with the value "b>x" is written the same
        ids = ids_of(CALL_FAMILIES[name], CALL_FAMILIES[name].render([("look", {"a>b": "x"})]))
        turn = parse(CALL_FAMILIES[name], ids, tools={"look": BOTH})
        assert [call.status for call in turn.calls] == [MALFORMED]
    else:
        assert outcome(CALL_FAMILIES[name], BOTH, {"a>b": "x", "a": "y"}) == "equal"


@pytest.mark.parametrize("name", ["lfm2", "olmo3", "pythonic", "llama4_pythonic"])
def test_names_that_python_does_not_allow_are_read_as_their_template_writes_them(name: str) -> None:
    family = CALL_FAMILIES[name]
    text = family.render([("mcp-mail/list.all-2", {"max-results": 5, "$filter": "x"})])
    [call] = parse(family, ids_of(family, text), tools={}).calls
    assert (call.status, call.name, call.arguments) == (OK, "mcp-mail/list.all-2", {"max-results": 5, "$filter": "x"})


PYTHON_TEMPLATE = """{%- for m in messages %}{%- for c in m.tool_calls or [] %}<tool_call>
<function={{ c.function.name }}>
{%- for key, value in c.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | string }}
</parameter>{%- endfor %}</function>
</tool_call>{%- endfor %}{%- endfor %}"""


@pytest.mark.parametrize("template", [PYTHON_TEMPLATE, PYTHON_TEMPLATE.replace("| string", "| tojson")])
def test_lists_in_python_are_read_where_the_template_writes_them(template: str) -> None:
    """As the first template of Qwen3-Coder does."""
    tokenizer = byte_level((), template)
    session = get_tool_parser("qwen3_coder", tokenizer).start((), {"look": {"properties": {"at": {"type": "array"}}}})
    text = "<tool_call>\n<function=look>\n<parameter=at>\n['x', True]\n</parameter>\n</function>\n</tool_call>"
    session.feed(tokenizer.encode(text, add_special_tokens=False))
    [call] = session.finish(truncated=False).calls
    writes_python = template is PYTHON_TEMPLATE
    assert (call.status, call.arguments) == ((OK, {"at": ["x", True]}) if writes_python else (MALFORMED, None))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"tags": ["x"]}),
        ({}, ["x"]),
        ({"type": "object"}, {"tags": ["x", "y"]}),
        ({}, {"item": "x", "b": 1}),
    ],
)
def test_minimax_m3_reads_a_list_without_a_schema_as_a_list(schema: Any, value: Any) -> None:
    assert outcome(CALL_FAMILIES["minimax_m3"], {"properties": {"at": schema}}, {"at": value}) == "equal"


DANGLING = {"$ref": "#/$defs/absent"}


@pytest.mark.parametrize(
    ("schema", "fits", "refused"),
    [
        ({"type": "string", "pattern": "^x+$"}, "xx", "y"),
        ({"type": "string", "pattern": "(?<x"}, "y", 5),  # not a pattern of Python
        ({"oneOf": [DANGLING, {"type": "integer"}]}, 5, None),  # what is unknown may fit or not
        ({"type": "string", "not": DANGLING}, "y", 5),
        ({"type": "string", "if": DANGLING, "then": {"const": "z"}}, "y", 5),
    ],
)
def test_what_cannot_be_known_of_a_schema_refuses_nothing(schema: Any, fits: Any, refused: Any) -> None:
    tool = ToolSchema({"type": "object", "properties": {"a": schema}})
    assert tool.faults({"a": fits}) == ()
    assert refused is None or tool.faults({"a": refused})


_SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([2.0, 0.5, "", "a", "1"])
_KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array"])
_MEMBERS = st.fixed_dictionaries(
    {},
    optional={"type": _KINDS | st.lists(_KINDS, min_size=1, unique=True), "minimum": st.just(1), "title": st.just("")},
)
_FLAT = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), _MEMBERS | st.just(True))},
    optional={
        "required": st.lists(st.sampled_from("abcd"), unique=True),
        "additionalProperties": st.booleans() | st.just({"type": "string"}),
        "minProperties": st.just(2),
    },
)


@given(_FLAT, st.dictionaries(st.sampled_from("abcd"), _SCALARS | st.lists(_SCALARS, max_size=1)))
def test_arguments_fit_a_flat_schema_where_the_validator_finds_no_error(schema: Any, arguments: Any) -> None:
    found = ToolSchema(schema).fit(arguments)
    assert (found.arguments == arguments) == Draft202012Validator(schema).is_valid(arguments)
