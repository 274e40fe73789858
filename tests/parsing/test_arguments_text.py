"""The text of a call's arguments is the policy's own, to the character, where the format writes JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from parsing.families import FAMILIES, NAMES, Call, ids_of, parse
from parsing.strategies import turns
from tito_core.parsing import CallStatus

PLAIN = {"qwen3_coder", "glm45", "glm47", "minimax_m2", "deepseek_v32", "deepseek_v4", "gemma4"}
PLAIN |= {"pythonic", "llama4_pythonic", "deepseek_v41", "kimi_k3", "lfm2", "longcat2", "mimo", "minimax_m3", "olmo3"}
PLAIN |= {"seed_oss", "step3"}


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_it_stands_in_the_call_and_reads_as_the_arguments(name: str, by_token: bool) -> None:
    family = FAMILIES[name]

    @settings(max_examples=40)
    @given(turns(family, by_token))
    def check(calls: list[Call]) -> None:
        found = parse(family, ids_of(family, family.render(calls), by_token), calls, by_token=by_token).calls
        assert len(found) == len(calls)
        for call in found:
            assert (call.arguments_text is None) == (name in PLAIN)
            if call.arguments_text is not None:
                assert call.arguments_text in call.raw
                assert json.loads(call.arguments_text) == call.arguments

    check()


SPACED = '{ "far" : 1.50e1,\t"at":"\\u0041\\n}"  ,"deep":{"parameters":{},"arguments":[ ]} }'
FRAMES = {
    "hermes": [
        '<tool_call>{{"name": "look", "arguments": {}}}</tool_call>',
        '<tool_call>\n{{ "arguments":{} ,\n"name":"look" }}\n</tool_call>',
        '<tool_call>{{"n\\u0061me": "look", "arguments"  :  {}  }}</tool_call>',
    ],
    "llama3_json": ['{{"name": "look", "parameters": {}}}', '{{"name": "lo\\u006fk", "parameters": {} }};'],
    "mistral": ["[TOOL_CALLS]look[ARGS]{}", '[TOOL_CALLS][{{"id": "123456789", "name": "look", "arguments": {}}}]'],
    "granite": ['<|tool_call|>[ {{"name": "look", "arguments": {} }} , {{"name": "a", "arguments": {{}}}} ]'],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|> {} "
        "<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ],
    "gpt_oss": ["<|start|>assistant<|channel|>commentary to=functions.look<|message|>{}<|call|>"],
}


@pytest.mark.parametrize(("name", "frame"), [(name, frame) for name, frames in FRAMES.items() for frame in frames])
def test_blanks_escapes_and_numbers_stay_as_written(name: str, frame: str) -> None:
    family = FAMILIES[name]
    completion = frame.format(SPACED).removesuffix(";")
    call = parse(family, ids_of(family, completion, True), [], by_token=True).calls[0]
    assert (call.status, call.name, call.arguments) == (CallStatus.OK, "look", json.loads(SPACED))
    assert call.arguments_text == SPACED


@pytest.mark.parametrize("name", ["hermes", "granite", "kimi_k2"])
def test_a_call_that_is_not_sound_has_none(name: str) -> None:
    family = FAMILIES[name]
    completion = family.render([("look", {"at": "x"})]).replace('"x"', "x")
    [call] = parse(family, ids_of(family, completion, True), [], by_token=True).calls
    assert (call.status, call.arguments_text) == (CallStatus.MALFORMED, None)
