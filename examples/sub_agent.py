"""A sub-agent: an agent whose tool is another agent on the same model. Both share one ledger, each with its own root.

python examples/sub_agent.py --backend sglang
"""

from __future__ import annotations

import asyncio

from strands import Agent, tool

import at_engine
from calculator import make_agent
from strands_tito import Ledger, Policy, TITOModel
from tito_core.ledger import check_ledger

QUESTIONS = ["What is 25 * 17?", "What is 36 * 12?", "What is 148 + 389?"]


def make_pair(model: TITOModel) -> Agent:
    """Make an agent that delegates its sums to another agent, which has a calculator."""

    @tool(name="calculator")
    async def delegate(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: The expression, such as "12 + 30".
        """
        return str(await make_agent(model).invoke_async(f"What is {expression}?", limits={"turns": 3}))

    return Agent(model=model, tools=[delegate], system_prompt="You answer briefly.", callback_handler=None)


async def run_rollout(policy: Policy, question: str) -> Ledger:
    """Ask the outer agent."""
    model = policy.model(sampling={"temperature": 0.0, "max_new_tokens": 64})
    result = await make_pair(model).invoke_async(question, limits={"turns": 3})
    check_ledger(model.ledger)
    print(f"{question} {str(result).strip()}\n{model.ledger.tree()}\n")
    return model.ledger


async def main(policy: Policy) -> list[Ledger]:
    """Ask all questions. The turns of both agents are trained, each token once (law 3)."""
    ledgers = await asyncio.gather(*(run_rollout(policy, question) for question in QUESTIONS))
    for ledger in ledgers:
        trained = sum(int(trajectory.loss_mask.sum()) for trajectory in ledger.trajectories)
        assert trained == sum(len(turn.draft.output_ids) for turn in ledger)
    return list(ledgers)


if __name__ == "__main__":
    at_engine.run(main, __doc__)
