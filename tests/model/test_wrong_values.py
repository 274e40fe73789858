"""Values that Strands does not document are refused before sending, and nothing is committed."""

from __future__ import annotations

from typing import Any

import pytest

from support.scripted import Says, model_of
from tito_core.backend.values import InvalidValueError
from tito_core.chat.message_check import InvalidMessageError
from tito_core.chat.messages import UnsupportedContentError
from tito_core.turn.inputs import UnsupportedToolChoiceError

REFUSED = (InvalidMessageError, InvalidValueError, UnsupportedContentError, UnsupportedToolChoiceError)

USE = {"toolUseId": "call_1", "name": "add", "input": {"a": 1}}
RESULT = {"toolUseId": "call_1", "status": "success", "content": [{"text": "3"}]}
SPEC = {"name": "add", "description": "Add.", "inputSchema": {"json": {"type": "object"}}}
HELLO = [{"role": "user", "content": [{"text": "Hello?"}]}]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


DEEP = nested(100_000)


def message_of(block: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": role, "content": [block]}]}


def used(**changes: Any) -> dict[str, Any]:
    return message_of({"toolUse": {**USE, **changes}}, "assistant")


def resulting(**changes: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": [{"toolUse": USE}]}
    return {"messages": [*HELLO, answer, {"role": "user", "content": [{"toolResult": {**RESULT, **changes}}]}]}


def with_tool(**changes: Any) -> dict[str, Any]:
    return {"messages": HELLO, "tool_specs": [{**SPEC, **changes}]}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"messages": None}, "messages is None"),
        ({"messages": [3]}, r"messages\[0\] is 3"),
        ({"messages": [{"content": []}]}, r"messages\[0\] has no 'role'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no 'content'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\['content'\] is 3"),
        (message_of(None), r"\['content'\]\[0\] is None"),
        (message_of({"text": 3}), r"\['text'\] is 3"),
        (message_of({"toolUse": None}, "assistant"), r"\['toolUse'\] is None"),
        (message_of({"toolUse": {}}, "assistant"), "has no 'toolUseId'"),
        (used(toolUseId=[]), r"\['toolUseId'\] is \[\]"),
        (used(input=DEEP), "nested more than 100 levels"),
        (resulting(toolUseId={}), r"\['toolUseId'\] is \{\}"),
        (resulting(content=None), r"\['content'\] is None"),
        (resulting(content=[3]), r"\['content'\]\[0\] is 3"),
        (resulting(content=[{"text": 3}]), r"\['text'\] is 3"),
        (resulting(content=[{"json": DEEP}]), "nested more than 100 levels"),
        (resulting(content=[{"json": 10**5000}]), "more than 64 bits"),
        (message_of({"reasoningContent": None}, "assistant"), r"\['reasoningContent'\] is None"),
        (message_of({"reasoningContent": {"reasoningText": {}}}, "assistant"), "has no 'text'"),
        ({"messages": HELLO, "system_prompt": 3}, "system_prompt is 3"),
        ({"messages": HELLO, "model_state": "a"}, "model_state is 'a'"),
        ({"messages": HELLO, "model_state": 0}, "model_state is 0"),
        (resulting(unknown=DEEP), "nested more than 100 levels"),
        (resulting(unknown=10**5000), "more than 64 bits"),
        ({**with_tool(name="\ud800"), "tool_choice": {"any": {}}}, "surrogates not allowed"),
        ({"messages": HELLO, "tool_specs": 3}, "tool_specs is 3"),
        ({"messages": HELLO, "tool_specs": [3]}, r"tool_specs\[0\] is 3"),
        ({"messages": HELLO, "tool_specs": [{}]}, r"tool_specs\[0\] has no 'name'"),
        (with_tool(name=[]), r"\['name'\] is \[\]"),
        (with_tool(inputSchema=None), r"\['inputSchema'\] is None"),
        (with_tool(inputSchema={"json": DEEP}), "nested more than 100 levels"),
        ({**with_tool(), "tool_choice": 3}, "tool_choice is 3"),
        ({**with_tool(), "tool_choice": {"tool": {}}}, r"tool_choice\['tool'\] has no 'name'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
async def test_a_wrong_value_is_refused_before_anything_is_sent(arguments: dict[str, Any], fault: str) -> None:
    model = model_of("vllm", Says("Hi."))
    with pytest.raises(REFUSED) as caught:
        async for _ in model.stream(**arguments):
            pass
    assert len(str(caught.value)) < 1_000, fault
    assert "\n" not in str(caught.value)
    assert len(model.ledger) == 0
    assert model.scripted.requests == []  # type: ignore[attr-defined]
    async for _ in model.stream(HELLO):  # type: ignore[arg-type]
        pass
    assert len(model.ledger) == 1


async def test_an_error_without_a_bad_value_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from tito_core.turn import request

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a defect of ours")

    monkeypatch.setattr(request, "prepare", broken)
    with pytest.raises(KeyError, match="a defect of ours"):
        async for _ in model_of("vllm", Says("Hi.")).stream(HELLO):  # type: ignore[arg-type]
            pass
