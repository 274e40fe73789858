"""Calls are read again, and compared with those that the agent executes."""

from __future__ import annotations

from typing import Any

import pytest

from support.scripted import tokenizer
from tito_conformance.oracle import compare_sampling, compare_semantics
from tito_conformance.rendering import CallReader, compare_calls
from tito_core.ledger.turn import Semantics

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


@pytest.mark.parametrize(
    ("requested", "sent", "recorded", "limit", "problems"),
    [
        ({}, {}, {}, 9, 0),
        ({"top_k": 0}, {"top_k": -1}, {}, 9, 0),
        ({"top_k": 5}, {"top_k": 5}, {"top_k": 5}, 9, 0),
        ({"top_k": 5}, {"top_k": 4}, {"top_k": 5}, 9, 1),
        ({"top_k": 5}, {}, {}, 9, 2),
        ({"temperature": 0.5}, {"temperature": 0.5}, {}, 9, 1),
        (
            {"seed": 3, "min_new_tokens": 2},
            {"sampling_seed": 3, "min_tokens": 2},
            {"seed": 3, "min_new_tokens": 2},
            9,
            0,
        ),
        ({"stop": ["a"]}, {"stop": ["b", "a"]}, {}, 9, 0),
        ({"stop": ["a"]}, {"stop": ["b"]}, {}, 9, 1),
        ({}, {}, {}, 10, 1),
        ({}, {}, {}, 8, 1),
    ],
)
def test_parameters_that_are_not_sent_or_recorded_are_noticed(
    requested: dict[str, Any], sent: dict[str, Any], recorded: dict[str, Any], limit: int, problems: int
) -> None:
    found = list(compare_sampling({"max_new_tokens": 9, **requested}, {"max_tokens": 9, **sent}, recorded, limit))
    assert [check for check, _ in found] == ["requested"] * problems, found


@pytest.mark.parametrize(
    ("requested", "measured", "semantics", "grammar", "sound"),
    [
        ({}, False, (False, 1.0, False), False, True),
        ({"temperature": 0.5}, False, (False, 1.0, False), False, True),
        ({"temperature": 0.5}, False, (False, 0.5, False), False, False),
        ({"temperature": 0.5}, True, (True, 0.5, False), False, True),
        ({"temperature": 0.5}, True, (True, 1.0, False), False, False),
        ({}, True, (False, 1.0, False), False, False),
        ({"temperature": 0.5}, None, (None, None, False), False, True),
        ({"temperature": 0.5}, None, (None, 1.0, False), False, False),
        ({}, None, (None, 1.0, False), False, True),
        ({}, False, (False, 1.0, False), True, False),
        ({}, False, (False, 1.0, True), True, True),
        ({"presence_penalty": 1.0}, True, (True, 1.0, False), False, False),
        ({"frequency_penalty": 1.0}, True, (True, 1.0, False), False, False),
        ({"frequency_penalty": 1.0}, True, (True, 1.0, True), False, True),
        ({"frequency_penalty": 1.0}, False, (False, 1.0, False), False, True),
    ],
)
def test_wrong_semantics_are_noticed(
    requested: dict[str, Any], measured: bool | None, semantics: tuple[Any, ...], grammar: bool, sound: bool
) -> None:
    problems = list(compare_semantics(requested, Semantics(*semantics, "measured"), measured, grammar))
    assert [check for check, _ in problems] == ["semantics"] * (not sound), problems
