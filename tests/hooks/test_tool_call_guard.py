"""The calls that the guard refuses, the errors that the policy reads, and the calls that it allows."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strands.hooks import BeforeToolCallEvent
from strands.tools.tools import PythonAgentTool

from support.histories import observe
from support.scripted import call, tokenizer
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.hooks import ToolCallGuard
from tito_core.parsing.schema import LONGEST_FAULT, MOST_FAULTS, meaning

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "far": {"type": "integer", "minimum": 0},
        "deep": {"type": "object", "properties": {"list": {"type": "array", "items": {"type": "boolean"}}}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["at"],
    "additionalProperties": False,
}


def tool_with(schema: dict[str, Any], name: str = "look") -> PythonAgentTool:
    def run(tool_use: Any, **_: Any) -> Any:
        ran = json.dumps(tool_use["input"], sort_keys=True)
        return {"toolUseId": tool_use["toolUseId"], "status": "success", "content": [{"text": f"ran {ran}"}]}

    return PythonAgentTool(name, {"name": name, "description": "Look.", "inputSchema": {"json": schema}}, run)


async def test_unknown_tools_are_refused_and_valid_arguments_are_unchanged() -> None:
    guard, fits = ToolCallGuard(), '{"at": "x", "deep": {"list": [true]}, "far": 5.0, "maybe": null}'
    rollout = observe("sglang", call("lok", "{}") + call("look", fits) + call("lok", '{"at": 1}'), "So.", "More.")
    agent = rollout.agent(tools=[tool_with(SCHEMA)], hooks=[guard])
    await agent.invoke_async("Look.")
    await agent.invoke_async("And?")
    rollout.check()
    results: list[Any] = [block["toolResult"] for block in agent.messages[2]["content"] if "toolResult" in block]
    unknown = "Unknown tool 'lok'. Available tools: look."
    assert [result["content"][0]["text"] for result in results] == [unknown, f"ran {fits}", unknown]
    assert [result["status"] for result in results] == ["error", "success", "error"]
    assert guard.unknown_calls == {"lok": 2}
    guard.reset()
    assert guard.unknown_calls == {}


@pytest.mark.parametrize("name", ["a.b", "two words", "x" * 65, "é"])
async def test_an_invalid_tool_name_is_an_unknown_tool(name: str) -> None:
    guard = ToolCallGuard()
    rollout = observe("sglang", call("look", '{"at": "x"}') + call(name, "{}"), "So.", "More.")
    agent = rollout.agent(tools=[tool_with(SCHEMA)], hooks=[guard])
    await agent.invoke_async("Look.")
    await agent.invoke_async("And?")
    rollout.check()
    read = tokenizer().decode(rollout.script.requests[1].prompt_ids)
    assert read.index('ran {"at": "x"}') < read.index(f"Unknown tool {name!r}. Available tools: look.")
    assert guard.unknown_calls == {name: 1}


@pytest.mark.parametrize(
    ("names", "listed", "available"),
    [
        ("cabd", 2, "Available tools: a, b and 2 more."),
        ("cabd", 4, "Available tools: a, b, c, d."),
        ("", 25, "No tools are available."),
        ("a", None, ""),
    ],
)
async def test_the_error_lists_the_first_tools(names: str, listed: int | None, available: str) -> None:
    rollout = observe("vllm", call("e", "{}"), "So.")
    guard = ToolCallGuard(max_listed_tools=listed)
    agent = rollout.agent(tools=[tool_with(SCHEMA, name) for name in names], hooks=[guard])
    await agent.invoke_async("Look.")
    expected = f"Unknown tool 'e'. {available}".rstrip()
    assert agent.messages[2]["content"][0]["toolResult"]["content"] == [{"text": expected}]


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        ("{}", "'at' is a required property"),
        ('{"at": 1}', "at: 1 is not of type 'string'"),
        ('{"at": "x", "far": 1.5}', "far: 1.5 is not of type 'integer'"),
        ('{"at": "x", "far": -1}', "far: -1 is less than the minimum of 0"),
        ('{"at": "x", "far": true}', "far: True is not of type 'integer'"),
        ('{"at": "x", "deep": {"list": [true, 0]}}', "deep.list[1]: 0 is not of type 'boolean'"),
        ('{"at": "x", "up": 1}', "Additional properties are not allowed ('up' was unexpected)"),
        ('{"at": "x", "maybe": "y"}', "maybe: 'y' is not valid under any of the given schemas"),
        ('{"far": "y", "at": null}', "at: None is not of type 'string'; far: 'y' is not of type 'integer'"),
    ],
)
async def test_invalid_arguments_are_malformed_with_each_fault(arguments: str, faults: str) -> None:
    rollout = observe("sglang", call("look", arguments), "So.")
    await rollout.agent(tools=[tool_with(SCHEMA)], hooks=[ToolCallGuard()]).invoke_async("Look.")
    read = tokenizer().decode(rollout.script.requests[1].prompt_ids)
    assert f"The arguments do not fit the tool's schema: {faults}." in read


def refusal(guard: ToolCallGuard, schema: dict[str, Any], arguments: Any) -> Any:
    """Return what the guard says of a call that another parser has read."""
    use = {"name": "look", "input": arguments}
    event: Any = SimpleNamespace(cancel_tool=False, tool_use=use, selected_tool=tool_with(schema), agent=None)
    guard.check_call(event)
    return event.cancel_tool


def test_invalid_arguments_of_other_parsers_are_refused_and_counted() -> None:
    guard = ToolCallGuard()
    faults = "at: 1 is not of type 'string'"
    assert refusal(guard, SCHEMA, {"at": 1}) == f"The arguments of 'look' do not fit its schema: {faults}."
    assert refusal(guard, SCHEMA, {"at": "x"}) is False
    assert guard.invalid_calls == {"look": 1}
    guard.reset()
    assert guard.invalid_calls == {}


async def test_a_malformed_call_keeps_its_own_reason(caplog: pytest.LogCaptureFixture) -> None:
    guard = ToolCallGuard()
    rollout = observe("vllm", call("look", '{"at": "x",}'), "So.")
    agent = rollout.agent(tools=[tool_with(SCHEMA)], hooks=[guard])
    await agent.invoke_async("Look.")
    assert agent.messages[1]["content"][0]["toolUse"]["name"] == MALFORMED_CALL
    assert not guard.unknown_calls
    assert "malformed" in tokenizer().decode(rollout.script.requests[1].prompt_ids)
    assert "not found in registry" not in caplog.text  # Strands' error for a tool that does not exist


async def test_another_hooks_cancellation_is_unchanged() -> None:
    guard = ToolCallGuard()
    rollout = observe("vllm", call("nope", "{}"), "So.")

    def cancel(event: BeforeToolCallEvent) -> None:
        event.cancel_tool = "first"

    agent = rollout.agent(hooks=[cancel, guard])
    await agent.invoke_async("Go.")
    assert agent.messages[2]["content"][0]["toolResult"]["content"] == [{"text": "first"}]
    assert not guard.unknown_calls


@pytest.mark.parametrize("schema", [{"at": {"type": "strin"}}, {"at": {"$ref": "http://localhost:9/schema"}}])
async def test_what_a_schema_says_in_vain_is_not_checked_on_record_and_never_fetched(
    schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = observe("vllm", call("look", '{"at": "x", "far": 1}'), call("look", '{"at": "x", "far": "x"}'), "So.")
    agent = rollout.agent(tools=[tool_with({"properties": {**schema, "far": {"type": "integer"}}})])
    await agent.invoke_async("Look.")
    first, second = (turn.draft.calls[0] for turn in rollout.model.ledger if turn.draft.calls)
    assert (first.status, second.status) == ("ok", "malformed")
    assert first.reason.startswith("Not checked: ")
    assert caplog.text.count(first.reason) == 1


def test_a_schema_that_refers_to_itself_without_end_says_nothing() -> None:
    tool = tool_with({"$ref": "#", "required": ["at"]})
    assert refusal(ToolCallGuard(), tool.tool_spec["inputSchema"]["json"], {"at": "x"}) is False
    assert "required" in refusal(ToolCallGuard(), tool.tool_spec["inputSchema"]["json"], {})


async def test_a_replaced_tool_has_its_own_schema() -> None:
    rollout = observe("vllm", call("look", '{"at": "x"}'), "So.", call("look", '{"at": "x"}'), "So.")
    agent = rollout.agent(tools=[tool_with(SCHEMA)], hooks=[ToolCallGuard()])
    await agent.invoke_async("Look.")
    agent.tool_registry.registry["look"] = tool_with({"type": "object", "required": ["far"]})
    await agent.invoke_async("Look.")
    [[first], [second]] = [
        [block["toolResult"]["status"] for block in message["content"]]
        for message in agent.messages
        if "toolResult" in message["content"][0]
    ]
    assert (first, second) == ("success", "error")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2) | st.floats(-2, 2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SCHEMA["properties"], "up"]), inner),
    max_leaves=6,
)


@given(json_values)
def test_arguments_have_faults_exactly_when_the_schema_refuses_them(value: Any) -> None:
    faults = meaning(SCHEMA).faults(value)
    assert bool(faults) != jsonschema.Draft202012Validator(SCHEMA).is_valid(value)
    assert len(faults) <= MOST_FAULTS
    assert all(0 < len(fault) <= LONGEST_FAULT + 30 for fault in faults)


def test_faults_are_few_and_short() -> None:
    schema = meaning({"type": "object", "additionalProperties": {"type": "integer"}})
    faults = schema.faults({f"k{number}": "x" * 1000 for number in range(9)})
    assert len(faults) == MOST_FAULTS
    assert faults[0] == "k0: '" + "x" * (LONGEST_FAULT - 1) + "..."


def test_a_schema_is_read_in_its_own_draft() -> None:
    closed = {"items": [{"type": "string"}], "additionalItems": False}
    assert not meaning({**closed, "items": {}}).faults(["x", "y"])
    seven = meaning({"$schema": "http://json-schema.org/draft-07/schema#", **closed})
    assert seven.faults(["x", "y"])
