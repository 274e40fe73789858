"""The task of the pipeline: arithmetic with a calculator that takes one operation, its agent, and two rewards."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from strands import Agent, tool
from strands.hooks import AfterInvocationEvent
from strands.types.content import Messages

from strands_tito import Ledger, TITOModel
from tito_core.hooks import LoopLimiter


def problems(count: int, operations: int, seed: int = 0) -> dict[str, int]:
    """Return different questions with their answers, always the same for a seed."""
    draw, found = random.Random(seed), dict[str, int]()
    while len(found) < count:
        text = str(value := draw.randint(12, 99))
        for number in range(operations):
            sign, other = draw.choice("+-*"), draw.randint(3, 99)
            value = {"+": value + other, "-": value - other, "*": value * other}[sign]
            text = f"{f'({text})' if number else text} {sign} {other}"
        found[f"What is {text}?"] = value
    return found


@tool
def calculator(expression: str) -> str:
    """Evaluate one operation of two numbers.

    Args:
        expression: The expression, such as "12 + 30".
    """
    parts = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if parts is None:
        raise ValueError(f"{expression!r} is not one operation of two whole numbers.")
    a, b = int(parts[1]), int(parts[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[parts[2]])


def scores_of(messages: Messages, answer: int) -> tuple[float, float]:
    """Return 1 if the last words hold the answer, else 0; and 0.25 for a valid call, 0.5 for the right result."""
    results = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
    texts = ["".join(part.get("text", "") for part in result["content"]) for result in results]
    used = 0.5 if str(answer) in texts else 0.25 * any(result["status"] == "success" for result in results)
    last = messages[-1]
    words = " ".join(block.get("text", "") for block in last["content"]) if last["role"] == "assistant" else ""
    return float(str(answer) in words.replace(",", "").rstrip(" .").split()), used


class Agents:
    """Makes the agents and keeps their ledgers, which the reward of tool use reads."""

    def __init__(self, answers: Mapping[str, int], operations: int) -> None:
        self.answers, self.operations = answers, operations
        self.ledgers: dict[str, Ledger] = {}

    def make(self, model: TITOModel, row: Any) -> Agent:
        """Make the agent of one rollout, which records its two scores in the ledger; `row` is the prompt."""
        self.ledgers[model.ledger.uuid] = model.ledger
        limiter = LoopLimiter(max_tool_iters=self.operations + 1)
        agent = Agent(model=model, tools=[calculator], hooks=[limiter], callback_handler=None)

        def score(event: AfterInvocationEvent) -> None:
            right, used = scores_of(agent.messages, self.answers[question_of(row)])
            model.ledger.annotate("reward", right)
            model.ledger.annotate("tool_use", used)

        agent.hooks.add_callback(AfterInvocationEvent, score)
        return agent

    def tool_use_reward(self, rollout_id: Sequence[str], **_: Any) -> list[float | None]:
        """Return the reward of tool use: a function for the trainer's `reward_funcs`."""
        return [self.ledgers[each].annotation("tool_use") for each in rollout_id]


def question_of(prompt: Any) -> str:
    """Return the question of a prompt in messages."""
    return str(prompt[-1]["content"])


def prompt_of(question: str) -> list[dict[str, str]]:
    """Return the prompt of a question, in messages."""
    return [{"role": "user", "content": question}]
