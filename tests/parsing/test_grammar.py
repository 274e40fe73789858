"""Whatever a grammar for a forced call allows is a valid call of that tool; `prove/forced.py` asks XGrammar itself."""

from __future__ import annotations

import json
from functools import reduce
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parsing import schemas
from parsing.families import CALL_FAMILIES, NAMES, ids_of
from tito_core.parsing import CallStatus, NoCallGrammarError, get_tool_parser
from tito_core.parsing.grammar import for_grammar
from tito_core.parsing.schema import kinds_of, meaning

TOOLS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "far": {"type": "integer"},
            "kind": {"type": "string", "enum": ["red", "dark blue"]},
            "deep": {"$ref": "#/$defs/deep"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["at", "far"],
        "$defs": {"deep": {"type": "object", "properties": {"all": {"type": "array"}}}},
    },
    "count": {"type": "object", "properties": {"of": {"type": "string"}}, "required": []},
    "rest": {},
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text("ab é\n<>", max_size=5),
    "integer": st.integers(),
    "array": st.lists(st.booleans(), max_size=2),
}


def json_for(schema: Any, draw: st.DrawFn, whole: Any) -> Any:
    if schema is True or not schema:
        return None
    if "$ref" in schema:
        steps = schema["$ref"].split("/")[1:]
        schema = reduce(lambda found, step: found[step], steps, whole)
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if "anyOf" in schema:
        return json_for(draw(st.sampled_from(schema["anyOf"])), draw, whole)
    if schema.get("type") == "object":
        keys = [k for k in schema.get("properties", {}) if k in schema.get("required", ()) or draw(st.booleans())]
        return {key: json_for(schema["properties"][key], draw, whole) for key in keys}
    return None if schema["type"] == "null" else draw(VALUES[schema["type"]])


class Sampler:
    """Generates ids that a structural tag allows."""

    def __init__(self, family: Any, by_token: bool, draw: st.DrawFn) -> None:
        self.draw = draw
        self.spell = lambda text: ids_of(family, text, False)
        self.plain = VALUES["string"].map(self.spell)

    def ids(self, grammar: Any) -> list[int]:
        return list(getattr(self, grammar["type"])(grammar))

    def const_string(self, grammar: Any) -> list[int]:
        assert grammar["value"]
        return list(self.spell(grammar["value"]))

    def token(self, grammar: Any) -> list[int]:
        assert isinstance(grammar["token"], int)
        return [grammar["token"]]

    def sequence(self, grammar: Any) -> list[int]:
        return [token for element in grammar["elements"] for token in self.ids(element)]

    def star(self, grammar: Any) -> list[int]:
        return self.optional(grammar)

    def optional(self, grammar: Any) -> list[int]:
        return self.ids(grammar["content"]) if self.draw(st.booleans()) else []

    def regex(self, grammar: Any) -> list[int]:
        return list(self.spell(self.draw(st.from_regex(grammar["pattern"], fullmatch=True))))

    def any_text(self, grammar: Any) -> list[int]:
        return list(self.draw(self.plain))

    def any_tokens(self, grammar: Any) -> list[int]:
        return list(self.draw(self.plain))

    def tag(self, grammar: Any) -> list[int]:
        return [*self.spell(grammar["begin"]), *self.ids(grammar["content"]), *self.spell(grammar["end"])]

    def json_schema(self, grammar: Any) -> list[int]:
        schema = grammar["json_schema"]
        assert isinstance(schema, dict)
        return list(self.spell(json.dumps(json_for(schema, self.draw, schema), ensure_ascii=False)))


def _or(self: Sampler, grammar: Any) -> list[int]:
    assert len(grammar["elements"]) > 1
    return self.ids(self.draw(st.sampled_from(grammar["elements"])))


setattr(Sampler, "or", _or)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if CALL_FAMILIES[name].forced])
def test_what_it_allows_is_a_valid_call_of_the_tool(name: str, by_token: bool) -> None:
    family = CALL_FAMILIES[name]
    parser = get_tool_parser(name, family.tokenizer(by_token))
    open_think = ids_of(family, (family.think or ("", ""))[0], by_token)

    @settings(max_examples=15)
    @given(st.data(), st.sampled_from([None, *TOOLS]), st.booleans())
    def check(data: st.DataObject, forced: str | None, thinking: bool) -> None:
        tail = open_think if thinking else []
        grammar = parser.call_grammar(TOOLS, forced, tail)
        assert grammar.kind == "structural_tag"
        value = json.loads(grammar.value)
        assert value["type"] == "structural_tag"
        ids = Sampler(family, by_token, data.draw).ids(value["format"])  # type: ignore[arg-type]
        session = parser.start(tail, TOOLS)
        session.feed(ids)
        turn = session.finish(truncated=False)
        [call] = turn.calls
        assert (call.status, call.reason) == (CallStatus.OK, "")
        assert call.name in ([forced] if forced else TOOLS)
        assert set(TOOLS[call.name or ""].get("required", ())) <= set(call.arguments or {})
        assert (turn.text, turn.reasoning_closed) == ("", True)

    check()


@pytest.mark.parametrize("name", [name for name in NAMES if not CALL_FAMILIES[name].forced])
def test_formats_without_a_grammar_raise(name: str) -> None:
    parser = get_tool_parser(name, CALL_FAMILIES[name].tokenizer(True))
    with pytest.raises(NoCallGrammarError, match=r"cannot be forced.*tool_choice.*sampling\.grammar"):
        parser.call_grammar(TOOLS)


def test_only_known_tools_can_be_forced() -> None:
    parser = get_tool_parser("hermes", CALL_FAMILIES["hermes"].tokenizer(True))
    with pytest.raises(NoCallGrammarError, match=r"'lok'.*count, look, rest"):
        parser.call_grammar(TOOLS, "lok")
    with pytest.raises(NoCallGrammarError, match="no tools"):
        parser.call_grammar({})


@pytest.mark.parametrize(
    ("name", "tail", "sampled"),
    [
        ("hermes", "", []),
        ("hermes", "<think>", ["</think>", "<tool_call>"]),  # a blank line or the call can follow the reasoning
        ("kimi_k2", "", ["<|tool_call_argument_begin|>"]),  # or another digit
        ("glm45", "", ["</arg_value>", "</tool_call>", "<arg_key>", "</arg_key>"]),  # or more of a value or a name
        ("deepseek_v31", "", []),
        ("mistral", "", []),
    ],
)
def test_control_tokens_are_avoided_but_for_those_that_end_what_may_go_on(
    name: str, tail: str, sampled: list[str]
) -> None:
    family = CALL_FAMILIES[name]
    tokenizer = family.tokenizer(True)
    parser: Any = get_tool_parser(name, tokenizer)
    avoided = parser.call_grammar(TOOLS, "look", ids_of(family, tail, True)).avoided_ids
    assert list(avoided) == sorted(avoided)
    assert set(tokenizer.convert_tokens_to_ids(sampled)) == parser.markup.controls - set(avoided)
    assert set(avoided) < parser.markup.controls or not sampled


def test_control_tokens_are_demanded_by_id() -> None:
    family = CALL_FAMILIES["hermes"]
    tokenizer = family.tokenizer(True)
    grammar = get_tool_parser("hermes", tokenizer).call_grammar(TOOLS, "rest").value
    tokens = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<tool_call>", "</tool_call>")]
    elements = json.loads(grammar)["format"]["elements"]
    assert [elements[0], elements[-1]] == [{"type": "token", "token": token} for token in tokens]
    assert "<tool_call>" not in grammar


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
@example(Random(64))  # an option of a "oneOf" is `{"not": {}}`
def test_a_grammar_leaves_out_nothing_that_a_generated_schema_allows(rng: Random) -> None:
    schema, arguments = schemas.tool(rng, lambda: rng.choice("abz_") + rng.choice("ab"))
    meant = meaning(schema)
    assert schemas.is_valid(for_grammar(meant), arguments)
    assert meant.required() <= arguments.keys()
    assert not meant.is_closed() or arguments.keys() <= set(meant.names())
    for name, value in arguments.items():
        assert {*kinds_of(value)} & meant.kinds((name,))
        assert schemas.is_valid(for_grammar(meant, name), value)
        options = meant.options(name)
        assert options is None or value in options


ANY = {"type": "object", "additionalProperties": True}


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        ({"type": "string", "minLength": 3, "format": "date"}, {"type": "string"}),
        ({"type": "string", "pattern": "a"}, {"type": "string"}),
        ({"type": "string", "pattern": "^[a-z]{1,8}$"}, {"type": "string", "pattern": "^[a-z]{1,8}$"}),
        ({"type": "object", "required": ["z"]}, {**ANY, "required": ["z"], "properties": {"z": True}}),
        ({"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False}, ANY),
        ({"type": "array", "prefixItems": [{}]}, {"type": "array", "prefixItems": [{}], "items": True}),
        ({"type": "array", "contains": {}}, {"type": "array", "items": True}),
        (
            {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}]},
            {"anyOf": [{"type": "string"}, {"type": "string"}]},
        ),
        ({"$ref": "#/$defs/nobody", "anyOf": [False, {"type": "null"}]}, {"anyOf": [{"type": "null"}]}),
    ],
)
def test_keywords_that_xgrammar_reads_narrowly_are_widened(given: Any, wide: Any) -> None:
    found = for_grammar(meaning({"type": "object", "properties": {"at": given}}))["properties"]["at"]
    assert {key: value for key, value in found.items() if key != "$comment"} == wide


def test_a_reference_in_a_parameter_leads_to_the_same_schema_as_in_the_tool() -> None:
    tool = meaning({"properties": {"at": {"$ref": "#/properties/far"}, "far": {"type": "integer"}}})
    assert schemas.is_valid(for_grammar(tool, "at"), 5)
    assert not schemas.is_valid(for_grammar(tool, "at"), "x")
