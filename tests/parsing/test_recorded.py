"""Every turn in recorded.json parses exactly as recorded. Run `parsing.record` after an intended change."""

from __future__ import annotations

import json
import re
import sys

import pytest

from parsing.edges import EDGES
from parsing.families import CALL_FAMILIES, NAMES
from parsing.record import PATH, read, record

RECORDED = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_parses_as_recorded(name: str) -> None:
    for turn in RECORDED[name]:
        found = read(CALL_FAMILIES[name], turn["completion"], turn["calls"], turn["by_token"], turn["truncated"])
        assert as_written(found) == as_written(turn["parsed"]), turn["completion"]


def test_the_record_is_what_its_generator_writes() -> None:
    """One format tells whether the generator changed since; it holds no JSON, whose errors differ between Pythons."""
    assert json.loads(json.dumps(record(CALL_FAMILIES["olmo3"]))) == RECORDED["olmo3"]


def as_written(parsed: object) -> object:
    """Return a record; from Python 3.13 on without what `json` says of an error, which is in other words there."""
    text = json.dumps(parsed)
    if sys.version_info >= (3, 13):
        text = re.sub(r"not valid JSON: [^\"]*? \(char \d+\)", "not valid JSON", text)
    return json.loads(text)


def test_the_record_has_every_format_and_all_edge_cases() -> None:
    assert sorted(RECORDED) == NAMES
    for name, kept in RECORDED.items():
        completion = {turn["completion"] for turn in kept}
        assert completion >= set(EDGES.get(name, ()))
        assert len(completion) > len(set(EDGES.get(name, ()))) + 3
