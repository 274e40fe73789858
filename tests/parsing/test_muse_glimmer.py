"""Muse Glimmer: who a message is for decides what it is; recorded.json has its other cases."""

from __future__ import annotations

import pytest

from parsing.families import CALL_FAMILIES, Call, ids_of, parse
from tito_core.parsing import CallStatus

FAMILY = CALL_FAMILIES["muse_glimmer"]
CALLS: list[Call] = [("look", {"at": "x", "far": 5})]
BODY = FAMILY.render(CALLS).split("<|message|>")[1]
SELF, LOOK = (f"to={who}<|message|>" for who in ("self", "look"))


@pytest.mark.parametrize(("lenient", "status"), [(False, CallStatus.MALFORMED), (True, CallStatus.LENIENT)])
@pytest.mark.parametrize(
    ("completion", "reason", "reasoning", "after"),
    [
        (f" to=count<|message|>{BODY}", "count", "", []),
        (
            f" {LOOK}{BODY}<|start|>assistant {LOOK}{BODY}",
            "no <|eom|> after the functions.",
            "",
            ["ok"],
        ),
        (f" {SELF}Hm.<|start|>assistant {LOOK}{BODY}", "", "Hm.", []),
    ],
    ids=["to another recipient", "without its end", "after reasoning that never ended"],
)
def test_loose_calls(
    completion: str, reason: str, reasoning: str, after: list[str], lenient: bool, status: CallStatus
) -> None:
    turn = parse(FAMILY, ids_of(FAMILY, completion), CALLS, lenient=lenient)
    assert [(call.status, call.name) for call in turn.calls] == [(each, "look") for each in (status, *after)]
    assert reason in turn.calls[0].reason
    assert turn.reasoning == reasoning
