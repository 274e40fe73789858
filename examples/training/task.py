"""The task: sums that the agent is to work out with its calculator, and a reward in four steps."""

from __future__ import annotations

import random
from dataclasses import dataclass

from strands.types.content import Messages
from strands.types.exceptions import MaxTokensReachedException

from calculator import make_agent
from strands_tito import Ledger, Policy, record_termination, termination_of

PHRASES = ("What is {}?", "How much is {}?", "Work out {}.", "Please compute {}.", "Tell me what {} comes to.")
SAMPLING = {"temperature": 1.0, "max_new_tokens": 40}
"""At temperature 1 the logprobs of both engines are those of the policy itself."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its answer."""

    question: str
    answer: int


def problems(count: int, seed: int) -> list[Problem]:
    """Draw problems; a seed always gives the same ones."""
    draw = random.Random(seed)
    drawn = []
    for _ in range(count):
        sign = draw.choice("+-*")
        a, b = draw.randint(12, 99 if sign == "*" else 999), draw.randint(3, 99)
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        drawn.append(Problem(draw.choice(PHRASES).format(f"{a} {sign} {b}"), answer))
    return drawn


def reward_of(messages: Messages, answer: int) -> float:
    """Give 0.25 for a sound call, 0.5 where its result is right, 1 where the last words tell it; else 0."""
    results = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
    told = ["".join(part.get("text", "") for part in result["content"]) for result in results]
    last = messages[-1]
    words = " ".join(block.get("text", "") for block in last["content"]) if last["role"] == "assistant" else ""
    if str(answer) in told:
        return 1.0 if str(answer) in words.replace(",", "").rstrip(" .").split() else 0.5
    return 0.25 if any(result["status"] == "success" for result in results) else 0.0


async def attempt(policy: Policy, problem: Problem, group: str) -> Ledger:
    """Roll one agent out; its ledger says which group it is of, and what reward it got."""
    ledger = policy.ledger(group_id=group, task_id=problem.question)
    model = policy.model(ledger=ledger, sampling=SAMPLING, malformed_calls="end_turn")
    agent = make_agent(model)
    try:
        result = await agent.invoke_async(problem.question, limits={"turns": 2})
        reward, ended = reward_of(agent.messages, problem.answer), termination_of(result, ledger)
    except MaxTokensReachedException as error:  # words that do not end tell nothing
        reward, ended = min(reward_of(agent.messages, problem.answer), 0.5), termination_of(error, ledger)
    record_termination(ledger, ended)
    ledger.annotate("reward", reward)
    return ledger
