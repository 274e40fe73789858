"""A sub-agent, and both agents trained: an agent whose tool is another agent on the same model, each with its reward.

python examples/sub_agent.py --backend sglang
"""

from __future__ import annotations

import asyncio

from strands import Agent, tool
from strands.tools.executors import SequentialToolExecutor

import at_engine
from calculator import calculator, evaluate
from strands_tito import Ledger, Policy, TITOModel
from strands_tito.export import samples_of
from tito_core.ledger import check_ledger

QUESTIONS = {"What is 25 * 17?": "425", "What is 36 * 12?": "432", "What is 148 + 389?": "537"}


def make_pair(model: TITOModel) -> Agent:
    """Make a boss that delegates its sums to a worker, which has a calculator and is rewarded for its own answer."""

    @tool(name="calculator")
    async def delegate(expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: The expression, such as "12 + 30".
        """
        expected = f"{evaluate(expression):g}"
        worker = Agent(name="worker", model=model, tools=[calculator], callback_handler=None)
        answer = str(await worker.invoke_async(f"What is {expression}?", limits={"turns": 3}))
        model.ledger.annotate("reward", expected in answer, turn=model.ledger.last_turn("worker"))
        return answer

    return Agent(
        name="boss",
        model=model,
        tools=[delegate],
        tool_executor=SequentialToolExecutor(),  # one worker at a time: its last turn is the one that is rewarded
        system_prompt="You answer briefly.",
        callback_handler=None,
    )


async def run_rollout(policy: Policy, question: str) -> Ledger:
    """Ask the boss, and reward its last turn for the answer."""
    model = policy.model(ledger=policy.ledger(group_id=question), sampling={"temperature": 0.0, "max_new_tokens": 64})
    result = await make_pair(model).invoke_async(question, limits={"turns": 3})
    model.ledger.annotate("reward", QUESTIONS[question] in str(result), turn=model.ledger.last_turn("boss"))
    check_ledger(model.ledger)
    print(f"{question} {str(result).strip()}\n{model.ledger.tree()}")
    for sample in samples_of(model.ledger):
        print(f"{sample.identity.agent}: {sample.loss_mask.sum()} tokens trained with reward {sample.total}")
    return model.ledger


async def main(policy: Policy) -> list[Ledger]:
    """Ask all questions. The turns of both agents are trained, each token once (law 3), each agent with its reward."""
    ledgers = await asyncio.gather(*(run_rollout(policy, question) for question in QUESTIONS))
    for ledger in ledgers:
        trained = sum(int(sample.loss_mask.sum()) for sample in samples_of(ledger))
        assert trained == sum(len(turn.draft.output_ids) for turn in ledger)
    return list(ledgers)


if __name__ == "__main__":
    at_engine.run(main, __doc__)
