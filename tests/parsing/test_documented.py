"""Calls as the families' documentation and the engines' bug trackers show them: sound, damaged, drafts and loose.

Their author knew the parsers, but not the other tests. A loose case with expected calls has one reading.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parsing.families import CALL_FAMILIES, NAMES, ids_of, parse
from tito_core.parsing import ParsedTurn

GIVEN = json.loads(Path(__file__).with_name("documented.json").read_text(encoding="utf-8"))
TOOLS: dict[str, Any] = GIVEN["tools"]


def turns(name: str, *kinds: str) -> list[tuple[str, Any, str, ParsedTurn]]:
    """Parse the cases of some kinds with tags as tokens and as text, strict and lenient."""
    family = CALL_FAMILIES[name]
    return [
        (completion, expected, f"{kind} {mode}", read)
        for format_name, kind, completion, expected, _ in GIVEN["cases"]
        if format_name == name and kind in kinds
        for by_token in (True, False)
        for mode in ("strict", "lenient")
        for ids in [ids_of(family, completion, by_token)]
        for read in [parse(family, ids, tools=TOOLS, by_token=by_token, lenient=mode == "lenient")]
    ]


def running(turn: ParsedTurn) -> list[list[Any]]:
    return [[call.name, call.arguments] for call in turn.calls if call.status.runs]


@pytest.mark.parametrize("name", NAMES)
def test_sound_calls_run_and_damaged_ones_and_drafts_do_not(name: str) -> None:
    for completion, expected, _, turn in turns(name, "sound"):
        assert running(turn) == expected, completion
        assert len(turn.calls) == len(expected), completion
    for completion, _, _, turn in turns(name, "damaged", "draft", "text"):
        assert running(turn) == [], completion
    for completion, _, _, turn in turns(name, "damaged"):
        assert turn.records, completion


@pytest.mark.parametrize("name", NAMES)
def test_loose_calls_have_their_one_reading_or_a_status(name: str) -> None:
    for completion, expected, kind, turn in turns(name, "loose"):
        assert running(turn) in ([], expected), (completion, kind)
        assert turn.records or not expected, completion
