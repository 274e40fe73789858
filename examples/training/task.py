"""The task: sums to solve with a calculator, and a reward of four levels."""

from __future__ import annotations

import random
from dataclasses import dataclass

from strands.types.content import Messages
from strands.types.exceptions import MaxTokensReachedException

from calculator import make_agent
from strands_tito import Adapter, Ledger, Policy, SamplingParams, record_termination, termination_of

PHRASES = ("What is {}?", "How much is {}?", "Work out {}.", "Please compute {}.", "Tell me what {} comes to.")
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=40)
"""At temperature 1 the logprobs of both engines are the policy's."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its answer."""

    question: str
    answer: int


def problems(count: int, seed: int) -> list[Problem]:
    """Return random problems, always the same for a seed."""
    draw = random.Random(seed)
    chosen = []
    for _ in range(count):
        sign = draw.choice("+-*")
        a, b = draw.randint(12, 99 if sign == "*" else 999), draw.randint(3, 99)
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        chosen.append(Problem(draw.choice(PHRASES).format(f"{a} {sign} {b}"), answer))
    return chosen


def reward_of(messages: Messages, answer: int) -> float:
    """Return 0.25 for a valid call, 0.5 if its result is right, 1 if the final answer has it too, else 0."""
    results = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
    results_text = ["".join(part.get("text", "") for part in result["content"]) for result in results]
    last = messages[-1]
    words = " ".join(block.get("text", "") for block in last["content"]) if last["role"] == "assistant" else ""
    if str(answer) in results_text:
        return 1.0 if str(answer) in words.replace(",", "").rstrip(" .").split() else 0.5
    return 0.25 if any(result["status"] == "success" for result in results) else 0.0


async def attempt(policy: Policy, problem: Problem, group: str, adapter: Adapter | None = None) -> Ledger:
    """Run one rollout, with a LoRA adapter if one is given; its ledger records group, reward and termination."""
    ledger = policy.ledger(group_id=group, task_id=problem.question)
    model = policy.model(ledger=ledger, adapter=adapter, sampling=SAMPLING, malformed_calls="end_turn")
    agent = make_agent(model)
    try:
        result = await agent.invoke_async(problem.question, limits={"turns": 2})
        reward, ended = reward_of(agent.messages, problem.answer), termination_of(result, ledger)
    except MaxTokensReachedException as error:  # a truncated final answer does not count
        reward, ended = min(reward_of(agent.messages, problem.answer), 0.5), termination_of(error, ledger)
    record_termination(ledger, ended)
    ledger.annotate("reward", reward)
    return ledger
