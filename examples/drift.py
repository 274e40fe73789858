"""Drift: what tokenizing the text of an answer again would have changed, and what that does to a logprob.

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
from strands_tito.inspect.summary import drifted_turns
from tito_core.backend.checked import score
from tito_core.ledger.turn import Turn

SHOWN = 6


async def roll_out(policy: Policy, question: str) -> Ledger:
    """Ask one question at temperature 1, where spellings that no tokenizer makes are common."""
    model = policy.model(sampling={"temperature": 1.0, "max_new_tokens": 64})
    with contextlib.suppress(MaxTokensReachedException):  # what was cut off was sampled all the same
        await make_agent(model).invoke_async(question, limits={"turns": 4})
    return model.ledger


def first_difference(policy: Policy, turn: Turn) -> str:
    """Show where sampled ids and those of their text part, as pieces of text."""
    ids = turn.draft.output_ids.tolist()
    again = policy.tokenizer.encode(policy.tokenizer.decode(ids), add_special_tokens=False)
    at = next(i for i in range(max(len(ids), len(again))) if ids[i : i + 1] != again[i : i + 1])
    pieces = [[policy.tokenizer.decode(token) for token in run[at : at + 3]] for run in (ids, again)]
    return f"token {at} of {len(ids)}: sampled {pieces[0]}, re-tokenized {pieces[1]} ({len(again)} in all)"


async def moved(policy: Policy, turn: Turn, prompt: list[int]) -> float:
    """Give how far the summed logprob of an answer is from that of its re-tokenized text, in nats."""
    ids = policy.tokenizer.encode(policy.tokenizer.decode(turn.draft.output_ids.tolist()), add_special_tokens=False)
    scores = await score(policy.backend, [*prompt, *ids])
    return float(np.abs(scores[len(prompt) :].sum() - turn.draft.logprobs.sum()))


async def main(policy: Policy) -> tuple[int, int]:
    """Count the turns that would have changed; show some of them."""
    ledgers = await asyncio.gather(*(roll_out(policy, question) for question in QUESTIONS))
    found = [(ledger, ledger[index]) for ledger in ledgers for index in drifted_turns(ledger, policy.tokenizer)]
    for ledger, turn in found[:SHOWN]:
        prompt = ledger.path_ids(turn.index)[: -len(turn.draft.output_ids)].tolist()
        print(f"{first_difference(policy, turn)}; log p moves by {await moved(policy, turn, prompt):.2f} nats")
    turns = sum(map(len, ledgers))
    print(f"{len(found)} of {turns} turns ({len(found) / turns:.0%}) would train tokens that were never sampled")
    return len(found), turns


if __name__ == "__main__":
    at_engine.run(main, __doc__)
