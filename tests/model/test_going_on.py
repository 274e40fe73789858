"""After an error about a message in the history, the agent continues when the advice in the error is followed."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException

from support.scripted import Says, call, model_of
from tito_core import store
from tito_core.chat.messages import UnsupportedContentError
from tito_core.ledger import check_ledger

ADVICE = re.compile(r"agent\.messages\S* = \[?\{'text': '\.\.\.'\}\]?|del agent\.messages\[[^\]]*\]")


def follow_advice(agent: Agent, error: BaseException) -> None:
    """Run the Python statement in an error message."""
    statement = ADVICE.search(str(error))
    assert statement is not None, str(error)
    exec(statement[0], {"agent": agent})  # as a user would type it


def agent_of(*answers: Any, result: Any = None, **options: Any) -> tuple[Agent, Any]:
    @tool
    def look() -> Any:
        """Look."""
        return result

    model = model_of("vllm", Says(*answers), **options)
    agent = Agent(model=model, tools=[look], callback_handler=None, conversation_manager=NullConversationManager())
    return agent, model


IMAGE = {"image": {"format": "png", "source": {"bytes": b"\x89PNG"}}}
DOCUMENT = {"document": {"format": "txt", "name": "a", "source": {"bytes": b"a"}}}
VIDEO = {"video": {"format": "mp4", "source": {"bytes": b"a"}}}


@pytest.mark.parametrize("block", [IMAGE, DOCUMENT, VIDEO], ids=["image", "document", "video"])
@pytest.mark.parametrize("with_text", [True, False])
async def test_an_unsupported_block_of_a_user_message(block: Any, with_text: bool) -> None:
    agent, model = agent_of("One.", "Two.", "Three.")
    await agent.invoke_async("First?")
    content = [{"text": "What is this?"}, block] if with_text else [block]
    with pytest.raises(UnsupportedContentError) as caught:
        await agent.invoke_async(content)
    assert "essage 2 (user)" in str(caught.value)
    assert f"'{next(iter(block))}'" in str(caught.value)
    with pytest.raises(UnsupportedContentError, match="essage 2"):
        await agent.invoke_async("And now?")
    assert len(model.ledger) == 1
    del agent.messages[3:]
    follow_advice(agent, caught.value)
    assert str(await agent.invoke_async()) == "Two.\n"
    assert str(await agent.invoke_async("Third?")) == "Three.\n"
    assert [turn.parent for turn in model.ledger] == [None, 0, 1]
    check_ledger(model.ledger)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"text": "a"}, IMAGE], r"essage 2 \(user\).*'image'.*tool result"),
        ([{"json": {"x": [float("nan")]}}], r"\['json'\]\['x'\]\[0\] is nan"),
        ([{"json": {"x": b"a"}}], r"\['json'\]\['x'\] is of type bytes"),
        ([{"json": {"x": {1, 2}}}], r"\['json'\]\['x'\] is of type set"),
    ],
)
async def test_an_unsupported_block_of_a_tool_result(content: Any, words: str) -> None:
    agent, model = agent_of(call("look", "{}"), "Seen.", result={"status": "success", "content": [*content]})
    with pytest.raises(EventLoopException, match=words) as caught:
        await agent.invoke_async("Look.")
    assert len(model.ledger) == 1
    follow_advice(agent, caught.value)
    assert str(await agent.invoke_async()) == "Seen.\n"
    assert [turn.parent for turn in model.ledger] == [None, 0]


async def test_a_question_that_does_not_fit() -> None:
    agent, model = agent_of("One.", "Two.", max_model_len=600)
    await agent.invoke_async("First?")
    with pytest.raises(ContextWindowOverflowException, match=r"'text' in message 2 \(user\)") as caught:
        await agent.invoke_async("word " * 2000)
    assert len(model.ledger) == 1
    follow_advice(agent, caught.value)
    assert str(await agent.invoke_async()) == "Two.\n"
    assert [turn.parent for turn in model.ledger] == [None, 0]


@pytest.mark.parametrize("size", [2_000, 40_000])
async def test_a_tools_result_that_does_not_fit(size: int) -> None:
    agent, model = agent_of(call("look", "{}"), "Seen.", result="word " * size, max_model_len=600)
    with pytest.raises(ContextWindowOverflowException, match=r"'toolResult' in message 2 \(user\)") as caught:
        await agent.invoke_async("Look.")
    assert len(model.ledger) == 1
    follow_advice(agent, caught.value)
    assert str(await agent.invoke_async()) == "Seen.\n"
    assert [turn.parent for turn in model.ledger] == [None, 0]


FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from([2**64, -(10**500)]), FINITE, st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_what_json_a_policy_called_a_tool_with_stays_legal(tmp_path: Path) -> None:
    """In the call, in the tool's result, rendered again on a branch, and in the file."""

    @settings(deadline=None, max_examples=30)
    @given(JSON)
    def holds(value: Any) -> None:
        written = call("look", json.dumps({"at": [value]}))
        model = model_of(
            "vllm", Says(written, "One.", "Two."), sampling={"max_new_tokens": 99_999}, max_model_len=999_999
        )
        seen: list[Any] = []

        @tool
        def look(at: list[Any]) -> Any:
            """Look."""
            seen.append(at)
            return {"status": "success", "content": [{"json": {"at": at}}]}

        agent = Agent(model=model, tools=[look], callback_handler=None)
        asyncio.run(agent.invoke_async("First?"))
        assert json.dumps(seen) == json.dumps([[value]])
        agent.messages[0]["content"][0]["text"] = "Edited?"
        assert str(asyncio.run(agent.invoke_async("Second?"))) == "Two.\n"
        model.ledger.annotate("seen", seen)
        store.append(file := tmp_path / f"{model.ledger.uuid}.tito", [model.ledger])
        [read] = store.read(file)
        check_ledger(read)
        assert len(read) == 3

    holds()
