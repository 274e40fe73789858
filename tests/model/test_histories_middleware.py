"""Middleware that changes calls and answers, so that Strands stores a history that the model never saw."""

from __future__ import annotations

import re
from typing import Any

import pytest
from strands import Agent
from strands.vended_plugins.context_injector import ContextInjector

from support.conversations import user
from support.histories import add, observe
from support.scripted import STRANDS, Says, call, model_of, tokenizer
from tito_core.backend.values import InvalidValueError
from tito_core.ledger import check_ledger
from tito_core.turn.inputs import TurnInput

if STRANDS < (1, 62):
    pytest.skip(f"Strands has middleware from 1.62 on, and this is {STRANDS}", allow_module_level=True)
from strands.middleware import InvokeModelStage


async def ask(agent: Any, *questions: str) -> None:
    for question in questions:
        await agent.invoke_async(question)


async def test_a_message_shown_for_one_call_only_is_left_out_of_the_next() -> None:
    rollout = observe("vllm", "One.", "Two.", "Three.")
    agent = rollout.agent()
    agent.add_middleware(
        InvokeModelStage.Input,
        lambda context: context.replace(messages=[*context.messages, user(f"({len(context.messages)} so far)")]),
    )
    await ask(agent, "First?", "Second?", "Third?")
    assert rollout.parents == [None, None, None]
    assert rollout.branches == {1: ("TRIM", 0, 1), 2: ("TRIM", 1, 3)}
    rollout.check()


@pytest.mark.parametrize("trigger", ["everyTurn", "userTurn"])
async def test_what_strands_injects_for_one_call_stays_on_the_path_and_is_not_part_of_the_history(trigger: Any) -> None:
    rounds = [call("add", f'{{"a": {i}, "b": 1}}') for i in range(3)]
    model = model_of("vllm", Says(*rounds, "Three.", "Fine."), history="error")
    injector = ContextInjector(lambda context: f"<now>{len(context.messages)}</now>", trigger=trigger)
    agent = Agent(model=model, tools=[add], callback_handler=None, plugins=[injector])
    await ask(agent, "Count.", "Well?")
    assert "<now>" not in str(agent.messages)
    check_ledger(model.ledger)
    [trajectory] = model.trajectories
    assert [turn.parent for turn in model.ledger] == [None, 0, 1, 2, 3]
    text = tokenizer().decode(trajectory.token_ids.tolist())
    assert re.findall("<now>(.)</now>", text) == (["1", "3", "5", "7", "9"] if trigger == "everyTurn" else ["1", "9"])
    assert trajectory.loss_mask.astype(int).sum() == sum(len(turn.draft.output_ids) for turn in model.ledger)


async def test_a_question_asked_again_with_another_injection_is_a_retry() -> None:
    model = model_of("vllm", Says("One.", "Uno."))
    for injected in ("a", "b"):
        messages: Any = [{"role": "user", "content": [{"text": "First?"}, {"text": injected}]}]
        async for _ in model.stream(messages, dynamic_trailing_blocks=1, model_state={}):
            pass
        assert messages[0]["content"][1] == {"text": injected}
    assert len(model.ledger.leaves()) == 2
    assert [turn.draft.branch is not None for turn in model.ledger] == [False, True]


@pytest.mark.parametrize("count", [-1, True, "1", 0.5])
def test_a_number_of_injected_blocks_is_checked(count: Any) -> None:
    with pytest.raises(InvalidValueError, match="dynamic_trailing_blocks must be a number of blocks"):
        model_of("vllm", Says("One.")).stream([user("a")], dynamic_trailing_blocks=count)
    assert TurnInput([user("a")], injected=5).history == [{"role": "user", "content": []}]


async def test_middleware_that_calls_twice_is_a_retry() -> None:
    rollout = observe("vllm", "One.", "Uno.", "Two.", "Due.")
    agent = rollout.agent()

    async def twice(context: Any, next_fn: Any) -> Any:
        async for _ in next_fn(context):
            pass
        async for event in next_fn(context):
            yield event

    agent.add_middleware(InvokeModelStage, twice)
    await ask(agent, "First?", "Second?")
    assert rollout.parents == [None, None, 1, 1]
    assert rollout.branches == {1: ("RETRY", 0, 1), 3: ("RETRY", 1, 3)}
    rollout.check()
