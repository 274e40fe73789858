"""Drift: count the answers whose tokens change when their text is tokenized again, and measure the logprob error.

python examples/drift.py --backend sglang
"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
from strands.types.exceptions import MaxTokensReachedException

import at_engine
from calculator import QUESTIONS, make_agent
from strands_tito import Ledger, Policy
from strands_tito.inspect.show import drifted_turns
from tito_core.backend.generate import score
from tito_core.ledger.turn import Turn

SHOWN = 6


async def run_rollout(policy: Policy, question: str) -> Ledger:
    """Ask one question at temperature 1, at which sampled tokens often differ from the tokenizer's."""
    model = policy.model(sampling={"temperature": 1.0, "max_new_tokens": 64})
    with contextlib.suppress(MaxTokensReachedException):  # truncated answers count too
        await make_agent(model).invoke_async(question, limits={"turns": 4})
    return model.ledger


def first_difference(policy: Policy, turn: Turn) -> str:
    """Return the first difference between the sampled ids and the ids of their text."""
    ids = turn.draft.output_ids.tolist()
    again = policy.tokenizer.encode(policy.tokenizer.decode(ids), add_special_tokens=False)
    at = next(i for i in range(max(len(ids), len(again))) if ids[i : i + 1] != again[i : i + 1])
    pieces = [[policy.tokenizer.decode(token) for token in run[at : at + 3]] for run in (ids, again)]
    return f"token {at} of {len(ids)}: sampled {pieces[0]}, re-tokenized {pieces[1]} ({len(again)} in all)"


async def moved(policy: Policy, turn: Turn, prompt: list[int]) -> float:
    """Return the difference between the summed logprobs of an answer and of its re-tokenized text, in nats."""
    ids = policy.tokenizer.encode(policy.tokenizer.decode(turn.draft.output_ids.tolist()), add_special_tokens=False)
    scores = await score(policy.backend, [*prompt, *ids])
    return float(np.abs(scores[len(prompt) :].sum() - turn.draft.logprobs.sum()))


async def main(policy: Policy) -> tuple[int, int]:
    """Count the turns that re-tokenizing would change, and print some of them."""
    ledgers = await asyncio.gather(*(run_rollout(policy, question) for question in QUESTIONS))
    found = [(ledger, ledger[index]) for ledger in ledgers for index in drifted_turns(ledger, policy.tokenizer)]
    for ledger, turn in found[:SHOWN]:
        prompt = ledger.path_ids(turn.index)[: -len(turn.draft.output_ids)].tolist()
        print(f"{first_difference(policy, turn)}; log p moves by {await moved(policy, turn, prompt):.2f} nats")
    turns = sum(map(len, ledgers))
    print(f"{len(found)} of {turns} turns ({len(found) / turns:.0%}) would train tokens that were never sampled")
    return len(found), turns


if __name__ == "__main__":
    at_engine.run(main, __doc__)
