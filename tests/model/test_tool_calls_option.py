"""`tool_calls`: a loose call runs with "lenient", is malformed with "strict", and is recorded."""

from __future__ import annotations

from typing import Any

import pytest
from strands import tool

from support.histories import observe
from support.scripted import call, tokenizer
from tito_core.backend.values import InvalidValueError
from tito_core.ledger import check_ledger
from tito_core.turn.answer import CallCounts, ParseReport

LOOSE = call("look", '{"number": 3}').replace("</tool_call>", "").rstrip()
NO_TAG = "The call has no closing </tool_call> tag"


def looking() -> tuple[Any, list[int]]:
    ran: list[int] = []

    @tool
    def look(number: int = -1) -> str:
        """Look.

        Args:
            number: Which.
        """
        ran.append(number)
        return f"saw {number}"

    return look, ran


async def test_a_lenient_policy_runs_a_loose_call_and_marks_it() -> None:
    look, ran = looking()
    rollout = observe("sglang", LOOSE, "So.", tool_calls="lenient")
    await rollout.agent(tools=[look]).invoke_async("Look.")
    assert ran == [3]
    [record] = rollout.model.ledger[0].draft.calls
    assert (record.name, record.status, record.reason) == ("look", "lenient", f"{NO_TAG}.")
    report = rollout.model.parse_report
    assert report.tools == {"look": CallCounts(lenient={NO_TAG: 1})}
    assert (report.all.ran, report.all.ok, report.all.total) == (1, 0, 1)
    assert f"1 lenient ({NO_TAG})" in str(report)
    check_ledger(rollout.model.ledger)


async def test_a_strict_policy_reads_why_a_loose_call_did_not_run() -> None:
    look, ran = looking()
    rollout = observe("vllm", LOOSE, "So.")
    await rollout.agent(tools=[look]).invoke_async("Look.")
    assert ran == []
    [record] = rollout.model.ledger[0].draft.calls
    assert (record.name, record.status) == ("look", "malformed")
    assert NO_TAG in tokenizer().decode(rollout.script.requests[1].prompt_ids)
    assert rollout.model.parse_report.all.malformed == {NO_TAG: 1}


@pytest.mark.parametrize("thinks", ["lenient", "strict"])
async def test_a_call_after_reasoning_that_never_ends(thinks: Any) -> None:
    look, ran = looking()
    rollout = observe("sglang", f"<think>\nHm.\n{call('look', '{}')}", "So.", tool_calls=thinks)
    await rollout.agent(tools=[look]).invoke_async("Look.")
    assert ran == ([-1] if thinks == "lenient" else [])
    draft = rollout.model.ledger[0].draft
    assert [record.status for record in draft.calls] == ["lenient" if thinks == "lenient" else "malformed"]
    assert not draft.reasoning_closed
    assert rollout.model.parse_report.all.total == 1
    check_ledger(rollout.model.ledger)


async def test_text_that_only_looks_like_a_call_is_recorded_and_stays_text() -> None:
    look, ran = looking()
    text = 'Write {"name": "look", "arguments": {}} for it.'
    rollout = observe("vllm", text, tool_calls="lenient")
    result = await rollout.agent(tools=[look]).invoke_async("Look.")
    assert str(result).strip() == text
    assert ran == []
    [record] = rollout.model.ledger[0].draft.calls
    assert (record.name, record.status) == ("look", "suspect")
    report = ParseReport.of(rollout.model.ledger)
    assert (report.all.total, report.tools["look"].suspect) == (0, 1)
    assert "1 suspect" in str(report)
    check_ledger(rollout.model.ledger)


@pytest.mark.parametrize("given", ["loose", None, 5, True])
def test_tool_calls_is_one_of_two(given: Any) -> None:
    with pytest.raises(InvalidValueError, match="tool_calls must be 'strict' or 'lenient'"):
        observe("vllm", "Hm.", tool_calls=given)
