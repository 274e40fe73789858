"""Muse Glimmer: who a message is for decides what it is."""

from __future__ import annotations

import pytest

from parsing.families import CALL_FAMILIES, Call, ids_of, parse
from tito_core.parsing import CallStatus, ParsedTurn

FAMILY = CALL_FAMILIES["muse_glimmer"]
CALLS: list[Call] = [("look", {"at": "x", "far": 5})]
BODY = FAMILY.render(CALLS).split("<|message|>")[1]
CUT = BODY.split("</atem:invoke>")[0]
SELF, USER, LOOK = (f"to={who}<|message|>" for who in ("self", "user", "look"))
NEXT = "<|eom|><|start|>assistant "


def read(completion: str, *, by_token: bool = True, lenient: bool = False, truncated: bool = False) -> ParsedTurn:
    ids = ids_of(FAMILY, completion, by_token)
    return parse(FAMILY, ids, CALLS, by_token=by_token, lenient=lenient, truncated=truncated)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("before", ["", " "])
@pytest.mark.parametrize("stop", ["<|im_end|>", "<|eot|>", "<|eom|>"])
def test_the_first_message_has_no_header(by_token: bool, before: str, stop: str) -> None:
    turn = read(f"{before}{LOOK}{BODY}{stop}", by_token=by_token)
    assert [(call.status, call.name, call.arguments) for call in turn.calls] == [(CallStatus.OK, *CALLS[0])]
    assert turn.text == turn.reasoning == ""


@pytest.mark.parametrize("by_token", [True, False])
def test_a_turn_has_reasoning_and_text_and_calls(by_token: bool) -> None:
    turn = read(f" {SELF}Hm.{NEXT}{USER}I look.{NEXT}{LOOK}{BODY}{NEXT}{LOOK}{BODY}", by_token=by_token)
    assert (turn.reasoning, turn.text) == ("Hm.", "I look.")
    assert [(call.status, call.arguments) for call in turn.calls] == [(CallStatus.OK, CALLS[0][1])] * 2


def test_functions_in_reasoning_or_in_an_answer_do_not_run() -> None:
    turn = read(f" {SELF}Perhaps {BODY}?{NEXT}{USER}Write {BODY}")
    assert turn.calls == ()
    assert [call.status for call in turn.suspects] == [CallStatus.SUSPECT]
    assert turn.text == f"Write {BODY}"


def test_an_answer_without_a_recipient_is_text() -> None:
    assert read("<|message|>Yes.").text == "Yes."
    assert read(f"{SELF}Hm.<|eom|><|start|>assistant<|message|>Yes.").text == "Yes."


@pytest.mark.parametrize(("lenient", "status"), [(False, CallStatus.MALFORMED), (True, CallStatus.LENIENT)])
def test_a_function_that_is_not_the_recipient_is_loose(lenient: bool, status: CallStatus) -> None:
    [call] = read(f" to=count<|message|>{BODY}", lenient=lenient).calls
    assert (call.status, call.name) == (status, "look")
    assert "count" in call.reason


@pytest.mark.parametrize(("lenient", "status"), [(False, CallStatus.MALFORMED), (True, CallStatus.LENIENT)])
def test_a_message_without_its_end_is_loose(lenient: bool, status: CallStatus) -> None:
    turn = read(f" {LOOK}{BODY}<|start|>assistant {LOOK}{BODY}", lenient=lenient)
    assert [(call.status, call.name) for call in turn.calls] == [(status, "look"), (CallStatus.OK, "look")]
    assert turn.calls[0].reason == "The message has no <|eom|> after the functions." or status.runs


@pytest.mark.parametrize(("lenient", "status"), [(False, CallStatus.MALFORMED), (True, CallStatus.LENIENT)])
def test_a_call_after_reasoning_that_never_ended_is_loose(lenient: bool, status: CallStatus) -> None:
    turn = read(f" {SELF}Hm.<|start|>assistant {LOOK}{BODY}", lenient=lenient)
    assert [call.status for call in turn.calls] == [status]
    assert turn.reasoning == "Hm."


@pytest.mark.parametrize(
    "completion",
    [f"{LOOK}", f'{LOOK}{{"at": "x"}}', f"Hm.{NEXT}{LOOK}", f"Hm.{NEXT}to=lo", f"{LOOK}{CUT}", f"{LOOK}so {BODY}"],
)
def test_a_message_to_a_tool_without_a_call_is_reported(completion: str) -> None:
    for truncated in (False, True):
        statuses = [call.status for call in read(completion, truncated=truncated).calls]
        assert statuses
        assert set(statuses) <= {CallStatus.MALFORMED, CallStatus.TRUNCATED}


def test_a_header_without_a_recipient_is_no_call() -> None:
    for completion in ("<|start|>assistant", "Yes.<|eom|><|start|>assistant ", "Yes.<|start|>assistant"):
        for truncated in (False, True):
            assert read(completion, truncated=truncated).calls == ()
