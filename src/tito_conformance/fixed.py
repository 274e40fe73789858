"""What every server is asked in the same way: twice the same, alone and beside others, and what its logprobs mean."""

from __future__ import annotations

import asyncio
import uuid

import numpy as np

from tito_conformance.laws import Tally
from tito_conformance.target import Connected
from tito_core.backend.protocol import TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams

TOKENS = 24
NEAR_TIE_NATS = 0.02
"""Where two tokens lie this close, either may come."""
QUESTIONS = ("Count to ten.", "Name a colour.", "Write a line about rain.", "What is 17 * 3?")
CROWD = 8
"""Requests beside the one that is watched."""


async def ask(connected: Connected, tally: Tally, repeats: int) -> None:
    """Ask, and hold the answers to one another."""
    measured = connected.policy.info.processed_logprobs
    if measured is None:
        tally.skip("semantics", "The policy is too certain, or its context too short, to tell raw from processed.")
    else:
        tally.hold("semantics", True, "")
    for question in QUESTIONS[:repeats]:
        prompt = connected.policy.template.first_prompt(
            [{"role": "user", "content": [{"text": question}]}], None, None
        ).ids
        first = await _greedy(connected, prompt)
        _alike(tally, "repeatable", first, await _greedy(connected, prompt), question)
        watched, *_ = await asyncio.gather(
            _greedy(connected, prompt), *(_greedy(connected, prompt[: len(prompt) - 1 - n % 3]) for n in range(CROWD))
        )
        _alike(tally, "alone", first, watched, question)


async def _greedy(connected: Connected, prompt: np.ndarray) -> TokenResponse:
    sampling = connected.policy.sampling(SamplingParams(max_new_tokens=TOKENS, temperature=0.0))
    return await connected.policy.backend.generate(TokenRequest(prompt, sampling, uuid.uuid4().hex))


def _alike(tally: Tally, check: str, one: TokenResponse, other: TokenResponse, question: str) -> None:
    """Hold two greedy answers equal up to the first token that nearly was another."""
    n = min(len(one.output_ids), len(other.output_ids))
    apart = np.flatnonzero(one.output_ids[:n] != other.output_ids[:n])
    at = int(apart[0]) if len(apart) else n
    drift = float(np.max(np.abs(one.logprobs[:at] - other.logprobs[:at]), initial=0.0))
    if len(apart):
        margin = abs(float(one.logprobs[at] - other.logprobs[at]))
        problem = (
            f"{question!r}: token {at} is {one.output_ids[at]}, then {other.output_ids[at]}, {margin:.3g} nats apart."
        )
        tally.hold(check, margin <= NEAR_TIE_NATS, problem)
    else:
        tally.hold(check, len(one.output_ids) == len(other.output_ids), f"{question!r}: one answer is longer.")
    tally.hold(check, drift <= NEAR_TIE_NATS, f"{question!r}: equal tokens, but logprobs {drift:.3g} nats apart.")
