"""A scripted policy that multiplies with a tool, for requests in any order, and agents that use it."""

from __future__ import annotations

from itertools import count
from typing import Any

from strands import Agent, tool
from strands.hooks import AfterInvocationEvent, AfterToolCallEvent

from support.scripted import END, call, ids_of, tokenizer
from tito_conformance.testing import Completion, ScriptedRequest
from tito_core.ledger import Ledger

QUESTION = "What is 25 * 17?"
CALL = call("multiply", '{"a": 25, "b": 17}')
ANSWER = "It is 425."
SAMPLED = [*ids_of(CALL + END), *ids_of(ANSWER + END)]
ledgers: list[Ledger] = []
"""The ledgers of all agents made here, in order."""


def says(request: ScriptedRequest) -> Completion:
    """Answer according to the prompt, truncated at the request's limit."""
    text = tokenizer().decode(list(request.prompt_ids))
    ids = ids_of((ANSWER if "425" in text else CALL) + END)
    if len(ids) > request.max_new_tokens:
        return Completion(ids[: request.max_new_tokens], finish="length")
    return Completion(ids)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: One.
        b: Other.
    """
    return a * b


_rewards = count()


def make_agent(model: Any, row: Any) -> Agent:
    """Return an agent; the rewards of the rollouts alternate between 0 and 1."""
    agent = Agent(model=model, tools=[multiply], callback_handler=None)
    ledgers.append(model.ledger)
    reward = next(_rewards) % 2

    def score(event: AfterInvocationEvent) -> None:
        model.ledger.annotate("reward", reward)

    agent.hooks.add_callback(AfterInvocationEvent, score)
    return agent


def editing(agent: Agent) -> Agent:
    """Let an agent edit its history before its second answer, so that its rollout has two trajectories."""

    def edit(event: AfterToolCallEvent) -> None:
        event.agent.messages[0]["content"][0]["text"] = "What is 25 * 17, exactly?"

    agent.hooks.add_callback(AfterToolCallEvent, edit)
    return agent


def make_editing_agent(model: Any, row: Any) -> Agent:
    return editing(make_agent(model, row))


def make_credited_agent(model: Any, row: Any) -> Agent:
    """Return an editing agent whose call also has a reward, 0.25, and its last turn one of 0.5."""
    agent = make_editing_agent(model, row)

    def credit(event: AfterToolCallEvent) -> None:
        model.ledger.annotate("reward", 0.25, call=event.tool_use["toolUseId"])

    def score(event: AfterInvocationEvent) -> None:
        model.ledger.annotate("reward", 0.5, turn=model.ledger.last_turn())

    agent.hooks.add_callback(AfterToolCallEvent, credit)
    agent.hooks.add_callback(AfterInvocationEvent, score)
    return agent


def make_failing_agent(model: Any, row: Any) -> Agent:
    """Return an agent whose hook fails after the first tool call."""

    def fail(event: AfterToolCallEvent) -> None:
        raise RuntimeError("a hook that failed")

    agent = make_agent(model, row)
    agent.hooks.add_callback(AfterToolCallEvent, fail)
    return agent


def make_group_agent(model: Any, row: Any) -> Agent:
    """Return an agent whose question names its reward, such as "0.5. What ...", and "BRANCH" where it edits history.

    A question without a number records no reward.
    """
    question = row["raw_prompt"][-1]["content"] if isinstance(row, dict) else str(row)
    agent = Agent(model=model, tools=[multiply], callback_handler=None)
    first = question.split()[0].rstrip(".")

    def score(event: AfterInvocationEvent) -> None:
        model.ledger.annotate("reward", float(first))

    def edit(event: AfterToolCallEvent) -> None:
        event.agent.messages[0]["content"][0]["text"] = "What is 25 * 17, exactly?"

    if first[0].isdigit():
        agent.hooks.add_callback(AfterInvocationEvent, score)
    if "BRANCH" in question:
        agent.hooks.add_callback(AfterToolCallEvent, edit)
    return agent
