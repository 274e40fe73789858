"""Tools, interrupts, limits and structured output: the history after a call is continued."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel
from strands import tool
from strands.hooks import AfterToolsEvent

from support.histories import observe
from support.scripted import Says, call, ids_of, structured
from tito_conformance.testing import Completion, ScriptedRequest


@tool
def give(what: str) -> Any:
    """Give something back.

    Args:
        what: What.
    """
    given: dict[str, Any] = {
        "nothing": {"status": "success", "content": []},
        "blank": {"status": "success", "content": [{"text": ""}]},
        "json": {"status": "success", "content": [{"json": {"a": [1, 1.5, None, True], "é": "<&>"}}]},
        "both": {"status": "success", "content": [{"text": "one"}, {"json": [2]}, {"text": "three"}]},
        "error": {"status": "error", "content": [{"text": "it broke"}]},
    }
    if what == "raise":
        raise ValueError("it raised")
    return given[what]


@pytest.mark.parametrize("what", ["nothing", "blank", "json", "both", "error", "raise"])
async def test_every_kind_of_result_is_continued(what: str) -> None:
    rollout = observe("sglang", call("give", f'{{"what": "{what}"}}'), "So.", "More.")
    agent = rollout.agent(tools=[give])
    await agent.invoke_async("Give.")
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    assert rollout.branches == {}
    rollout.check()


async def test_parallel_results_read_in_the_order_of_their_calls_whatever_order_they_come_in() -> None:
    answers = [
        call("give", '{"what": "both"}'),
        call("add.x", "{}"),
        call("add", '{"a": 1, "b": 2}'),
        call("nope", "{}"),
    ]
    rollout = observe("sglang", "".join(answers), "So.", "More.")
    agent = rollout.agent(tools=[give, *rollout.agent().tool_registry.registry.values()])
    await agent.invoke_async("Do it all.")
    uses = [block["toolUse"]["toolUseId"] for block in agent.messages[1]["content"]]
    result_ids = [block["toolResult"]["toolUseId"] for block in agent.messages[2]["content"]]
    assert sorted(result_ids) == sorted(uses)
    assert result_ids[0] == uses[1], "the invalid name's error comes first"
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    rollout.check()


async def test_results_that_a_hook_reverses_are_rendered_in_the_order_of_the_calls() -> None:
    rollout = observe("sglang", call("add", '{"a": 1, "b": 2}') + call("add", '{"a": 3, "b": 4}'), "So.", "More.")
    agent = rollout.agent()
    agent.hooks.add_callback(AfterToolsEvent, lambda event: event.message["content"].reverse())
    await agent.invoke_async("Add.")
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    assert rollout.shown[1].messages[2]["content"][0]["toolResult"]["content"] == [{"text": "7"}]
    rollout.check()


STOP = " STOP"


class StopsAtString(Says):
    """A script that ends an answer at a stop string, as an engine does."""

    def __call__(self, request: ScriptedRequest) -> Completion:
        done = super().__call__(request)
        at_stop = list(done.output_ids[-len(ids_of(STOP)) :]) == ids_of(STOP)
        return replace(done, finish="stop", stop=STOP) if at_stop else done


async def test_a_stop_string_after_a_call_still_runs_the_call() -> None:
    first = ids_of(call("add", '{"a": 1, "b": 2}') + STOP)
    rollout = observe("sglang", lambda request: first, "So.", "More.", says=StopsAtString, sampling={"stop": [STOP]})
    agent = rollout.agent()
    result = await agent.invoke_async("Add.")
    assert result.stop_reason == "end_turn"
    assert rollout.model.ledger[0].draft.stop == STOP
    await agent.invoke_async("And?")
    assert rollout.parents == [None, 0, 1]
    rollout.check()


class Sum(BaseModel):
    """A sum."""

    total: int


async def test_structured_output_switched_on_and_off_again_opens_anew_each_time() -> None:
    rollout = observe("sglang", "One.", "It is five.", structured("Sum", '{"total": 5}'), "Four.", "Five.")
    agent = rollout.agent()
    await agent.invoke_async("First?")
    result = await agent.invoke_async("2 + 3?", structured_output_model=Sum)
    assert result.structured_output == Sum(total=5)
    await agent.invoke_async("Third?")
    await agent.invoke_async("Fourth?")
    # Strands adds a tool named after the class while it is on.
    assert rollout.parents == [None, None, 1, None, 3]
    assert rollout.branches == {1: ("OPENING", 0, None), 3: ("OPENING", 2, None)}
    assert [turn.draft.constrained for turn in rollout.model.ledger] == [False, False, True, False, False]
    rollout.check()
