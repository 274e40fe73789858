"""A math agent: groups of rollouts with rewards, and the columns for a trainer.

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


async def run_rollout(policy: Policy, question: str, answer: str) -> Ledger:
    """Ask one question; the ledger records the tokens, the reward and the termination."""
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
    """Run several rollouts of every problem concurrently, and print one line for each group."""
    attempts = [(question, answer) for question, answer in PROBLEMS.items() for _ in range(COPIES)]
    ledgers = await asyncio.gather(*(run_rollout(policy, *each) for each in attempts))
    for question in PROBLEMS:
        group = [ledger for ledger in ledgers if ledger.header.group_id == question]
        rewards = np.array([ledger.annotation("reward") for ledger in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        print(f"{question:20} rewards {rewards}  advantages {advantages.round(2)}")
    for ledger in ledgers:
        check_ledger(ledger)
        for trajectory in ledger.trajectories:  # one here; several if an agent edits its history
            trained = trajectory.loss_mask == 1
            assert np.isfinite(trajectory.logprobs[trained]).all()
    tokens = sum(int(t.loss_mask.sum()) for ledger in ledgers for t in ledger.trajectories)
    print(f"{len(ledgers)} rollouts, {tokens} tokens to train on, each with the logprob at which it was sampled")
    return list(ledgers)


if __name__ == "__main__":
    at_engine.run(main, __doc__)
