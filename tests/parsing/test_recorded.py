"""Every turn in recorded.json parses exactly as recorded. Run `parsing.record` after an intended change."""

import json
import re
import sys

import pytest

from parsing.families import CALL_FAMILIES, NAMES
from parsing.record import PATH, read, shown
from tito_core.parsing import CallStatus

RECORDED = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_parses_as_recorded(name: str) -> None:
    for turn in RECORDED[name]:
        found = read(CALL_FAMILIES[name], turn)
        assert as_written(shown(found)) == as_written(turn["parsed"]), turn["completion"]
        for call in found.calls:
            assert call.raw.strip() in turn["completion"], turn["completion"]
            assert call.reason.endswith(".") or call.status == CallStatus.OK


def as_written(parsed: object) -> object:
    """Return a record; from Python 3.13 on without what `json` says of an error, which is in other words there."""
    text = json.dumps(parsed)
    if sys.version_info >= (3, 13):
        text = re.sub(r"not valid JSON: [^\"]*? \(char \d+\)", "not valid JSON", text)
    return json.loads(text)


def test_the_record_has_every_format() -> None:
    assert sorted(RECORDED) == NAMES
