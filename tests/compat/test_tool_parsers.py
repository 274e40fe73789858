"""Tool parsers by name: they read text as strictly as the core reads ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scripted import call
from tito_sglang.tool_parsers import (
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
def test_plain_values_stay_text_without_a_schema(parser: Any, text: str) -> None:
    (result,) = parser.parse(text)
    assert (result.name, result.input) == ("a", {"x": "1"})


@pytest.mark.parametrize(
    "arguments", ['{"x": 1,}', "{x: 1}", '{"x": 1', "[1]", '{"x": 1} {"x": 2}', '{"x": 1, "x": 2}', "NaN"]
)
def test_a_malformed_call_is_an_error_and_not_repaired(arguments: str) -> None:
    text = call("add", arguments)
    (result,) = get_tool_parser("hermes").parse(f"Well. {text}")
    assert result.is_error
    assert result.input == {}
    assert result.payload == result.raw
    assert result.raw in text


def test_a_text_without_calls_has_none() -> None:
    assert get_tool_parser("kimi_k2").parse("") == get_tool_parser("glm").parse("Just text.") == []
    error = ToolParseResult.from_parse_error("call_0", "bad")
    assert (error.name, error.is_error, error.payload) == (ToolParseResult.UNKNOWN_NAME, True, "bad")
