"""What every server is asked in the same way: twice the same, alone and beside others, and what its logprobs mean."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import numpy as np

from strands_tito.conformance import routing
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.target import Connected
from tito_core.backend import OptionalOutputs
from tito_core.backend.checked import generate, score
from tito_core.backend.protocol import TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import semantics_of
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Finish

TOKENS = 24
MOST_TOP = 4
"""Likeliest tokens that are wanted of each at most."""
NEAR_TIE_NATS = 0.02
"""Where two tokens lie this close, either may come; or up to twice the tolerance, where that is more."""
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
        if question == QUESTIONS[0]:
            await routing.causal(connected, tally, prompt)
        await _likeliest(connected, tally, prompt)
        first = await _greedy(connected, prompt)
        await _obeyed(connected, tally, prompt, first, question)
        one, other = [await _sampled(connected, prompt, temperature=1.0, seed=11) for _ in range(2)]
        if connected.target.seeds or np.array_equal(one.output_ids, other.output_ids):
            _alike(connected, tally, "seeded", one, other, question)
        else:
            tally.skip("seeded", "The server does not keep to seeds; --seeds holds it to them.")
        _alike(connected, tally, "repeatable", first, await _greedy(connected, prompt), question)
        watched, *_ = await asyncio.gather(
            _greedy(connected, prompt), *(_greedy(connected, prompt[: len(prompt) - 1 - n % 3]) for n in range(CROWD))
        )
        _alike(connected, tally, "alone", first, watched, question)


async def _greedy(connected: Connected, prompt: TokenIds) -> TokenResponse:
    return await _sampled(connected, prompt, temperature=0.0)


async def _sampled(connected: Connected, prompt: TokenIds, **sampling: Any) -> TokenResponse:
    sampled = connected.policy.sampling(SamplingParams(**{"max_new_tokens": TOKENS, **sampling}))
    return await generate(connected.policy.backend, TokenRequest(prompt, sampled, uuid.uuid4().hex))


async def _likeliest(connected: Connected, tally: Tally, prompt: TokenIds) -> None:
    """Let the server score each token that it calls likely after a prompt."""
    info, backend = connected.policy.info, connected.policy.backend
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0)
    k = min(MOST_TOP, info.capabilities.top_logprobs or 0)
    if not k or not semantics_of(info, sampling).comparable_with_scoring():
        return
    optional_outputs = OptionalOutputs(top_logprobs=k)
    answer = await generate(
        backend, TokenRequest(prompt, sampling, uuid.uuid4().hex, optional_outputs=optional_outputs)
    )
    ids, logprobs = (answer.columns[name].values[0].tolist() for name in ("top_ids", "top_logprobs"))
    for token, logprob in zip(ids, logprobs, strict=True):
        apart = abs(float((await score(backend, [*prompt.tolist(), token]))[-1]) - logprob)
        problem = f"the likely token {token} has logprob {logprob:.4g}, {apart:.4g} nats from the server's own score."
        tally.hold("top", apart <= connected.target.tolerance_nats, problem)


async def _obeyed(connected: Connected, tally: Tally, prompt: TokenIds, greedy: TokenResponse, question: str) -> None:
    """Ask with parameters whose effect can be told from the answer."""
    likeliest = await _sampled(connected, prompt, temperature=1.0, top_k=1)
    _alike(connected, tally, "obeyed", greedy, likeliest, f"{question} with top_k=1")
    on, *longs = await asyncio.gather(
        _sampled(connected, prompt, temperature=1.0, ignore_eos=True),
        *(_sampled(connected, prompt, temperature=1.0, min_new_tokens=TOKENS, seed=seed) for seed in range(3)),
    )  # of three, since one answer may be as long by itself
    tally.hold("obeyed", len(on.output_ids) == TOKENS, f"ignore_eos: {len(on.output_ids)} of {TOKENS} tokens came.")
    for long in longs:
        problem = f"min_new_tokens={TOKENS}: {len(long.output_ids)} tokens came."
        tally.hold("obeyed", len(long.output_ids) == TOKENS, problem)
    again = await _sampled(connected, prompt, temperature=0.0, stop_token_ids=(int(greedy.output_ids[0]),))
    tally.hold("obeyed", len(again.output_ids) == 1, "a stop id that came first did not end the answer.")
    for ended in (again, greedy):
        if ended.finish == Finish.STOP:
            await _ended_at_the_limit(connected, tally, prompt, ended)


async def _ended_at_the_limit(connected: Connected, tally: Tally, prompt: TokenIds, ended: TokenResponse) -> None:
    """Ask again for exactly as many tokens as an answer had: its last one still ends it, and not the limit."""
    exact = await _sampled(
        connected,
        prompt,
        temperature=0.0,
        max_new_tokens=len(ended.output_ids),
        stop_token_ids=(int(ended.output_ids[-1]),),
    )
    if np.array_equal(exact.output_ids, ended.output_ids):
        problem = f"it ended by {exact.finish}, though its last token {exact.output_ids[-1]} is one that stops."
        tally.hold("finish", exact.finish == Finish.STOP, problem)


def _alike(
    connected: Connected, tally: Tally, check: str, one: TokenResponse, other: TokenResponse, question: str
) -> None:
    """Hold two greedy answers equal up to the first token that nearly was another."""
    near = max(NEAR_TIE_NATS, 2 * connected.target.tolerance_nats)
    n = min(len(one.output_ids), len(other.output_ids))
    apart = np.flatnonzero(one.output_ids[:n] != other.output_ids[:n])
    at = int(apart[0]) if len(apart) else n
    drift = float(np.max(np.abs(one.logprobs[:at] - other.logprobs[:at]), initial=0.0))
    if len(apart):
        margin = abs(float(one.logprobs[at] - other.logprobs[at]))
        problem = (
            f"{question!r}: token {at} is {one.output_ids[at]}, then {other.output_ids[at]}, {margin:.3g} nats apart."
        )
        tally.hold(check, margin <= near, problem)
        tally.notes.append(f"A near-tie fell two ways: {problem}")
    else:
        tally.hold(check, len(one.output_ids) == len(other.output_ids), f"{question!r}: one answer is longer.")
    tally.hold(check, drift <= near, f"{question!r}: equal tokens, but logprobs {drift:.3g} nats apart.")
