"""A math agent: groups of rollouts, a reward for each, and the columns that a trainer takes.

python examples/math_agent.py --backend sglang
"""

from __future__ import annotations

import asyncio

import numpy as np
from strands.types.exceptions import MaxTokensReachedException

import at_engine
from calculator import make_agent
from strands_tito import Ledger, Policy, record_termination, termination_of
from tito_core.ledger import check_ledger

PROBLEMS = {"What is 25 * 17?": "425", "What is 148 + 389?": "537", "What is 36 * 12?": "432"}
COPIES = 4


async def roll_out(policy: Policy, question: str, answer: str) -> Ledger:
    """Ask once; the ledger keeps what was sampled, what it was worth, and why it ended."""
    ledger = policy.ledger(group_id=question)
    model = policy.model(ledger=ledger, sampling={"temperature": 1.0, "max_new_tokens": 64})
    try:
        result = await make_agent(model).invoke_async(question, limits={"turns": 4})
        ledger.annotate("reward", float(answer in str(result)))
        record_termination(ledger, termination_of(result, ledger))
    except MaxTokensReachedException as error:
        ledger.annotate("reward", 0.0)
        record_termination(ledger, termination_of(error, ledger))
    return ledger


async def main(policy: Policy) -> list[Ledger]:
    """Roll every problem out several times, at once, and print a group a line."""
    asked = [(question, answer) for question, answer in PROBLEMS.items() for _ in range(COPIES)]
    ledgers = await asyncio.gather(*(roll_out(policy, *each) for each in asked))
    for question in PROBLEMS:
        group = [ledger for ledger in ledgers if ledger.header.group_id == question]
        rewards = np.array([ledger.annotation("reward") for ledger in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        print(f"{question:20} rewards {rewards}  advantages {advantages.round(2)}")
    for ledger in ledgers:
        check_ledger(ledger)
        for trajectory in ledger.trajectories():  # several where a history was edited; here always one
            trained = trajectory.loss_mask == 1
            assert np.isfinite(trajectory.logprobs[trained]).all()
    tokens = sum(int(t.loss_mask.sum()) for ledger in ledgers for t in ledger.trajectories())
    print(f"{len(ledgers)} rollouts, {tokens} tokens to train on, each with the logprob it was sampled at")
    return list(ledgers)


if __name__ == "__main__":
    at_engine.run(main, __doc__)
