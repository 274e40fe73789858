"""A rollout run to its end for a trainer: its prompt, its termination, and what does not stop the trainer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from strands import Agent
from strands.hooks import AfterInvocationEvent, AfterToolCallEvent

from strands_tito.export import samples_of
from strands_tito.integrations.run_rollout import load_function, run_rollout, strands_prompt
from support.multiplying import QUESTION, SAMPLED, make_agent, make_failing_agent, says
from support.scripted import BACKENDS, Says, model_of
from tito_core.hooks import LoopLimiter
from tito_core.termination import Termination, recorded_termination

by_kind = pytest.mark.parametrize("kind", BACKENDS)


@by_kind
async def test_a_rollout_ends_with_its_word_and_all_of_its_tokens(kind: str) -> None:
    model = model_of(kind, says)
    result = await run_rollout(make_agent(model, None), model, QUESTION)
    assert (result.termination, result.error) == (Termination.COMPLETED, None)
    assert recorded_termination(result.ledger) is Termination.COMPLETED
    (sample,) = samples_of(result.ledger)
    assert sample.token_ids[sample.loss_mask.astype(bool)].tolist() == SAMPLED
    assert sample.reward in (0.0, 1.0)


@by_kind
async def test_an_error_ends_the_rollout_and_not_the_trainer(kind: str) -> None:
    model = model_of(kind, says)
    result = await run_rollout(make_failing_agent(model, None), model, QUESTION)
    assert result.termination is Termination.TOOL_ERROR
    assert "a hook that failed" in str(result.error)
    assert len(result.ledger) == 1
    limited = model_of(kind, says)
    agent = Agent(model=limited, callback_handler=None, hooks=[LoopLimiter(max_messages=1)])
    assert (await run_rollout(agent, limited, QUESTION)).termination is Termination.LIMIT


@by_kind
async def test_a_cancelled_task_is_recorded_and_stays_cancelled(kind: str) -> None:
    model = model_of(kind, Says("Yes."), latency=60.0)
    task = asyncio.ensure_future(run_rollout(Agent(model=model, callback_handler=None), model, QUESTION))
    while not model.scripted.running:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recorded_termination(model.ledger) is Termination.CANCELLED
    assert len(model.ledger) == 0


@pytest.mark.parametrize("then_fails", [False, True])
async def test_an_agent_that_samples_after_a_reset_is_refused(then_fails: bool) -> None:
    """Otherwise the turns of one of the two ledgers would be lost without a sign."""
    model = model_of("vllm", says)
    agent = make_agent(model, None)
    agent.hooks.add_callback(AfterToolCallEvent, lambda event: model.reset())
    if then_fails:
        agent.hooks.add_callback(AfterInvocationEvent, lambda event: 1 / 0)
    with pytest.raises(ValueError, match=r"after model\.reset\(\) .* ledger: 1, in that one: 1\..* not at all"):
        await run_rollout(agent, model, QUESTION)


def test_a_chat_becomes_strands_messages_and_its_system_message_the_agents() -> None:
    agent = Agent(model=model_of("vllm", says), callback_handler=None)
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "now?"}]
    found = strands_prompt(agent, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert found == [{"role": "user", "content": [{"text": "What\nnow?"}]}]
    assert agent.system_prompt == "Be brief."
    assert strands_prompt(agent, "Hello.") == "Hello."


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "system", "content": "another"}],
    ],
)
def test_a_chat_that_cannot_be_asked_is_refused(chat: list[dict[str, Any]]) -> None:
    agent = Agent(model=model_of("vllm", says), system_prompt="One.", callback_handler=None)
    with pytest.raises(ValueError, match=r"Message [01] of the prompt"):
        strands_prompt(agent, chat)


def test_a_function_is_named_by_module_and_name() -> None:
    assert load_function("support.multiplying:make_agent") is make_agent
    assert load_function(make_agent) is make_agent
    for wrong in ("support.multiplying", "support.multiplying:nothing", "no_such_module:make", ""):
        with pytest.raises(ValueError, match="'module:function'"):
            load_function(wrong)
