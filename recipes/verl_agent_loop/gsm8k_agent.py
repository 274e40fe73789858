"""A Strands agent that solves word problems with a calculator, and its reward. agent_loop.yaml names `make_agent`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strands import Agent, tool
from strands.hooks import AfterInvocationEvent
from strands.types.content import Messages

from strands_tito import TITOModel
from tito_core.hooks import LoopLimiter

SYSTEM_PROMPT = (
    "Solve the problem step by step. Use the tool calculate for each calculation. End your last answer with a line of "
    "#### and the final number, such as: #### 42"
)
MAX_TOOL_ITERS = 6


@tool
def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers, + - * / and parentheses.

    Args:
        expression: The expression, such as "(12 + 30) / 7".
    """
    if not re.fullmatch(r"[\d\s.+\-*/()]{1,100}", expression) or re.search(r"\*\s*\*", expression):
        raise ValueError(f"{expression!r} is not plain arithmetic.")
    return f"{eval(expression, {'__builtins__': {}}):.10g}"  # digits and operators only: no name, no power


def make_agent(model: TITOModel, row: Mapping[str, Any]) -> Agent:
    """Make the agent of one rollout; `row` is that of the dataset, with the number in `reward_model`."""
    limiter = LoopLimiter(max_tool_iters=MAX_TOOL_ITERS)
    agent = Agent(model=model, tools=[calculate], hooks=[limiter], system_prompt=SYSTEM_PROMPT, callback_handler=None)

    def score(event: AfterInvocationEvent) -> None:
        model.ledger.annotate("reward", reward_of(agent.messages, str(row["reward_model"]["ground_truth"])))

    agent.hooks.add_callback(AfterInvocationEvent, score)
    return agent


def reward_of(messages: Messages, answer: str) -> float:
    """Return 1 if the last message is the policy's and ends with "#### " and the answer, else 0."""
    last = messages[-1]
    words = "".join(block.get("text", "") for block in last["content"]) if last["role"] == "assistant" else ""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", words)
    return float(bool(found) and float(found[-1].replace(",", "")) == float(answer))
