"""Completions of 31 formats whose author had not seen our parsers (evidence/parsers.md tells what he read).

`foreign.json` has tools, and cases: format, class, number, index of the tools, options ("o": the prompt opened
reasoning, "l": the token limit ended the completion), completion and the expected calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parsing.families import CALL_FAMILIES, HY, Family, ids_of, parse
from tito_core.parsing import ParsedTurn

GIVEN = json.loads(Path(__file__).with_name("foreign.json").read_text(encoding="utf-8"))
QUOTED = "To ask for the weather, the assistant writes", "This is what a call looks like in the documentation"
"""Beginnings of texts that quote a call's markup. It is written with the tags' tokens, so it runs (docs/tools.md)."""
OTHER_TAGS = {1262}
"""A draft in <think>, which is text in MiniMax M3: its tag is <mm:think>."""
TOO_SHORT = {1574, 1614}
"""Cut off inside `[writ`, which could be any text."""
UNPROVEN = {414, 1798, 1801, 1802, 1837}
"""Calls that he takes for well formed, but that are loose or, 1801, malformed; evidence/parsers.md has the reasons."""


def turns(name: str, *kinds: str, lenient: bool) -> list[tuple[int, str, Any, ParsedTurn]]:
    found = []
    for form, kind, number, tools, options, completion, expected in GIVEN["cases"]:
        if form != name or kind not in kinds:
            continue
        family = CALL_FAMILIES[name]
        completion = suffixed(completion) if name == "hy_v3" else completion
        opened = ids_of(family, family.think[0] + "\n") if "o" in options and family.think else []
        ids, given = ids_of(family, completion), GIVEN["tools"][tools]
        turn = parse(family, ids, tail=opened, tools=given, truncated="l" in options, lenient=lenient)
        found.append((number, completion, expected, turn))
    return found


def suffixed(completion: str) -> str:
    """Return a completion with the suffix that Hy3's tags have in our vocabulary."""
    for tag in sorted({tag.replace(HY, "") for tag in hy_tags(CALL_FAMILIES["hy_v3"])}):
        completion = completion.replace(tag, f"{tag[:-1]}{HY}>")
    return completion


def hy_tags(family: Family) -> tuple[str, ...]:
    return (*family.control, *family.think_tokens)


def running(turn: ParsedTurn) -> list[list[Any]]:
    return [[call.name, call.arguments] for call in turn.calls if call.status.runs]


FORMATS = sorted({case[0] for case in GIVEN["cases"]})


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_well_formed_calls_run(name: str, lenient: bool) -> None:
    for number, completion, expected, turn in turns(name, "well-formed", lenient=lenient):
        right = running(turn) == expected
        assert right or (number in UNPROVEN and running(turn) == [] and turn.records), (number, completion)


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_malformed_calls_and_text_do_not_run(name: str, lenient: bool) -> None:
    for number, completion, _, turn in turns(name, "malformed", lenient=lenient):
        assert running(turn) == [], (number, completion)
        assert turn.records or number in TOO_SHORT, (number, completion)
    for number, completion, _, turn in turns(name, "text", lenient=lenient):
        assert running(turn) == [] or completion.startswith(QUOTED) or number in OTHER_TAGS, (number, completion)


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_loose_call_has_its_reading_or_a_status(name: str, lenient: bool) -> None:
    for number, completion, expected, turn in turns(name, "loose", lenient=lenient):
        wrong = [call for call in running(turn) if call not in expected]
        assert wrong == [], (number, completion)
        assert running(turn) == expected or turn.records, (number, completion)
