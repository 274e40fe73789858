"""In formats that write arguments as JSON, the text of a call's arguments is exactly as sampled.

That it is part of the call and decodes to its arguments is checked in `test_formats.py` for generated calls.
"""

from __future__ import annotations

import json

import pytest

from parsing.families import CALL_FAMILIES, ids_of, parse
from tito_core.parsing import CallStatus

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
def test_blanks_escapes_and_numbers_are_as_sampled(name: str, frame: str) -> None:
    family = CALL_FAMILIES[name]
    completion = frame.format(SPACED).removesuffix(";")
    call = parse(family, ids_of(family, completion, True), [], by_token=True).calls[0]
    assert (call.status, call.name, call.arguments) == (CallStatus.OK, "look", json.loads(SPACED))
    assert call.arguments_text == SPACED
