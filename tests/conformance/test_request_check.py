"""Calls are read again, and compared with those that the agent executes."""

from __future__ import annotations

from typing import Any

import pytest

from strands_tito.conformance.request_check import CallReader, compare_calls
from support.scripted import tokenizer

TEXT = (
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    '<tool_call>\n{"name": "h", "arguments": {"a": 1,}}\n</tool_call>'
)
F, G = {"name": "f", "input": {"a": 1}}, {"name": "g", "input": {}}
WRONG = {"name": "malformed", "input": {}}


@pytest.mark.parametrize(
    ("uses", "sound"),
    [
        ([F, G, WRONG], True),
        ([F, G], True),
        ([F], False),
        ([G, F, WRONG], False),
        ([F, G, {"name": "h", "input": {"a": 1}}], False),
        ([F, {"name": "g", "input": {"b": None}}, WRONG], False),
    ],
)
def test_dropped_reversed_repaired_and_changed_calls_are_noticed(uses: list[Any], sound: bool) -> None:
    read = CallReader(tokenizer()).read(TEXT)
    assert read is not None
    assert list(compare_calls(read, uses, "malformed", whole=True)) == [] or not sound
    assert sound or list(compare_calls(read, uses, "malformed", whole=True))
