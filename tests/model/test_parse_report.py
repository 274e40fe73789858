"""Counts of well-formed and malformed calls of a rollout, by tool."""

from __future__ import annotations

import pytest
from strands import Agent, tool
from strands.types.exceptions import MaxTokensReachedException

from support.scripted import Says, call, ids_of, model_of
from tito_core import ParseReport
from tito_core.turn.answer import CallCounts, kind_of


@tool
def look(at: str) -> str:
    """Look.

    Args:
        at: Where.
    """
    return at


async def test_calls_are_counted_by_tool_status_and_kind_of_fault() -> None:
    cut = '<tool_call>{"name": "look", "argum'
    script = Says(
        call("look", '{"at": "x"}') + call("look", '{"at": }') + call("find", "{}"),
        call("look", '["x"]') + call("look", '{"at": 1 2}') + call("look", '{"at": "y"}'),
        cut + "...",
    )
    model = model_of("vllm", script)
    assert model.parse_report == ParseReport({}, CallCounts())
    agent = Agent(model=model, tools=[look], callback_handler=None)
    model.update_config(max_new_tokens=1000)
    await agent.invoke_async("Go.", limits={"turns": 2})
    model.update_config(max_new_tokens=len(ids_of(cut)))
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("Go on.")
    report = model.parse_report
    assert report.tools["find"] == CallCounts(1)
    [fault] = report.tools["look"].malformed
    assert '"arguments"' in fault
    assert report.tools["look"] == CallCounts(2, 0, {fault: 1})
    [not_json] = report.tools[None].malformed
    assert "JSON" in not_json
    assert report.tools[None] == CallCounts(0, 1, {not_json: 2})
    assert (report.all.ok, report.all.truncated, report.all.total) == (3, 1, 7)
    assert str(report).splitlines() == [
        "3 of 7 calls are well-formed",
        f"look: 2 ok, 1 malformed ({fault})",
        f"unknown tool: 0 ok, 2 malformed ({not_json}), 1 truncated",
        "find: 1 ok",
    ]
    model.reset()
    assert model.parse_report.all.total == 0
    assert report.all.total == 7


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("The call is not valid JSON: Expecting value: line 1 column 2 (char 1).", "The call is not valid JSON"),
        ("The argument 'it\\'s: 3' appears twice.", "The argument … appears twice"),
        ('The call has "it\'s" where <x> belongs.', "The call has … where <x> belongs"),
        ("The call nests more than 100 levels deep.", "The call nests more than … levels deep"),
        ("The arguments must be a JSON object, not list.", "The arguments must be a JSON object, not list"),
        ("There is no X.", "There is no X"),
        ("", ""),
    ],
)
def test_the_kind_of_a_fault_is_its_sentence_without_the_values(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind
