"""Tool parsers by name: they read text as strictly as the core reads ids."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scripted import call
from tito_compat.sglang_parsers import (
    GLMToolParser,
    HermesToolParser,
    KimiK2ToolParser,
    QwenXMLToolParser,
    ToolParseResult,
    get_tool_parser,
)

WORDS = st.text(st.characters(exclude_characters='<>\\"', exclude_categories=["Cs", "Cc"]), max_size=12)
ARGUMENTS = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}", fullmatch=True), WORDS | st.integers() | st.booleans(), max_size=3
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "look_up", "x"]), ARGUMENTS), max_size=4)
KIMI = "<|tool_call_begin|>functions.{0}:{2}<|tool_call_argument_begin|>{1}<|tool_call_end|>"


@settings(max_examples=20)
@given(CALLS, st.sampled_from(["", "Let me see. ", "<think>" + call("draft", "{}") + "</think>"]))
def test_written_calls_are_parsed(calls: list[tuple[str, dict[str, Any]]], before: str) -> None:
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    hermes = before + "\n".join(call(name, arguments) for name, arguments in written)
    kimi = "".join(KIMI.format(name, arguments, number) for number, (name, arguments) in enumerate(written))
    kimi = before + (f"<|tool_calls_section_begin|>{kimi}<|tool_calls_section_end|>" if calls else "")
    for parser, text in ((HermesToolParser(), hermes), (KimiK2ToolParser(), kimi)):
        results = parser.parse(text)
        assert [(result.name, result.input, result.raw) for result in results] == [(n, a, None) for n, a in calls]
        assert [json.loads(result.payload) for result in results] == [arguments for _, arguments in calls]
        assert len({result.id for result in results}) == len(calls)


def test_call_ids_are_numbered_and_kimi_ids_are_the_sampled_ones() -> None:
    ids = [result.id for result in HermesToolParser().parse(call("a", "{}") + call("b", "{}"))]
    assert [each[-4:] for each in ids] == ["0000", "0001"]
    assert ids[0][:-4] == ids[1][:-4]
    text = f"<|tool_calls_section_begin|>{KIMI.format('a', '{}', 7)}<|tool_calls_section_end|>"
    assert KimiK2ToolParser().parse(text)[0].id == "functions.a:7"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (QwenXMLToolParser(), "<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"),
        (GLMToolParser(), "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ],
)
def test_values_without_quotes_are_decoded_as_json(parser: Any, text: str) -> None:
    def read(value: str) -> Any:
        (result,) = parser.parse(text.replace("1", value))
        assert result.name == "a"
        return result.input["x"]

    values = {"1": 1, "[1, 2]": [1, 2], "true": True, '"a"': "a", "word": "word", '{"b": null}': {"b": None}}
    assert {value: read(value) for value in values} == values
    assert read("NaN") == "NaN"


@pytest.mark.parametrize(
    "arguments", ['{"x": 1,}', "{x: 1}", '{"x": 1', "[1]", '{"x": 1} {"x": 2}', '{"x": 1, "x": 2}', "NaN"]
)
def test_a_malformed_call_is_an_error_and_not_repaired(arguments: str) -> None:
    text = call("add", arguments)
    (result,) = get_tool_parser("hermes").parse(f"Well. {text}")
    assert result.is_error
    assert result.input == {}
    assert result.payload == result.raw
    assert result.raw == text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()
    assert result.name == "add", "a name is only counted"


def test_a_malformed_kimi_call_has_its_arguments_as_raw() -> None:
    text = f"<|tool_calls_section_begin|>{KIMI.format('a', '{x', 7)}<|tool_calls_section_end|>"
    (result,) = KimiK2ToolParser().parse(text)
    assert (result.id, result.name, result.raw) == ("functions.a:7", "a", "{x")


@settings(max_examples=20)
@given(CALLS, st.sampled_from([HermesToolParser, KimiK2ToolParser, GLMToolParser, QwenXMLToolParser]))
def test_other_tokens_are_read_the_same(calls: list[tuple[str, dict[str, Any]]], kind: Any) -> None:
    parser = kind("«", "»", "[[", "]]")
    body = {
        HermesToolParser: lambda name, arguments: json.dumps({"name": name, "arguments": arguments}),
        KimiK2ToolParser: lambda name, given: f"functions.{name}:0<|tool_call_argument_begin|>{json.dumps(given)}",
        GLMToolParser: lambda name, given: (
            name + "".join(f"<arg_key>{k}</arg_key><arg_value>{json.dumps(v)}</arg_value>" for k, v in given.items())
        ),
        QwenXMLToolParser: lambda name, given: (
            f"<function={name}>\n"
            + "".join(f"<parameter={k}>\n{json.dumps(v)}\n</parameter>\n" for k, v in given.items())
            + "</function>"
        ),
    }[kind]
    text = "[[ «draft» ]]" + " ".join(f"«{body(*call)}»" for call in calls)
    assert [(result.name, result.input) for result in parser.parse(text)] == calls


def test_patterns_of_the_formats_are_attributes() -> None:
    arguments = "<arg_key>x</arg_key>\n<arg_value> 1 </arg_value><arg_key> y</arg_key><arg_value>2</arg_value>"
    assert GLMToolParser.ARG_PATTERN.findall(arguments) == [("x", "1"), ("y", "2")]
    (section,) = KimiK2ToolParser.SECTION_PATTERN.findall(
        f"<|tool_calls_section_begin|>{KIMI.format('a', '{}', 7)}<|tool_calls_section_end|>"
    )
    (match,) = KimiK2ToolParser.CALL_PATTERN.finditer(section)
    assert match.groupdict() == {"tool_call_id": "functions.a:7", "arguments": "{}"}
    with pytest.raises(TypeError, match="Mine replaces ARG_PATTERN"):
        type("Mine", (GLMToolParser,), {"ARG_PATTERN": re.compile("x")})
    type("Mine", (GLMToolParser,), {"ARG_PATTERN": re.compile("x"), "parse": lambda self, text: []})


def test_a_text_without_calls_has_none() -> None:
    assert get_tool_parser("kimi_k2").parse("") == get_tool_parser("glm").parse("Just text.") == []
    error = ToolParseResult.from_parse_error("call_0", "bad")
    assert (error.name, error.is_error, error.payload) == (ToolParseResult.UNKNOWN_NAME, True, "bad")
