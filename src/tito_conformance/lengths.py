"""Long prompts, long answers and a full context: the server scores them as it reported them."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import numpy as np

from tito_conformance import target as precision
from tito_conformance.checks import Tally, Where
from tito_conformance.sampler import LEAST_TOP, QUESTIONS, Draw, draw_of, top_of
from tito_conformance.target import ConnectedServer
from tito_core.backend import OptionalOutputs
from tito_core.backend.generate import generate, score
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.semantics import semantics_of
from tito_core.ledger.columns import TokenIds

PROMPTS = (640, 1_089, 2_112)
"""Tokens of the long prompts: servers change their ways past 512, 1,024 and 2,048 (chunked prefill, graphs), and where
the last block of a cache is full (16 to 64 tokens: the first and the last prompt) or has one token."""
ANSWER = 300
"""Tokens of the long answer."""
SAMPLES = 4
"""Long answers at once, after the first two long prompts: they show the sampler, and what it makes of tokens that come
again."""
ENOUGH = 512
"""Sampled tokens after long prompts that show a wrong sampler: where answers end early, more of them are sampled."""
MOST_ROUNDS = 4
"""How often `SAMPLES` answers are sampled at most."""
SHORT_ANSWER = 48
"""Tokens of the answers to longer prompts."""
LARGEST_CONTEXT = 4_096
"""A larger context is not filled: on a CPU that takes minutes."""
ROOM = 40
"""Tokens that a prompt leaves of a full context: an answer, and the few more that engines need to score it."""
BIAS_SHARE = 0.1
"""Share of the tolerance that the mean and the median of all differences may reach: noise has no direction."""
SPARE = 16
"""Tokens that stay free: vLLM needs one to score, SGLang six."""
LEAST_FOR_BIAS = 100
"""Tokens below which a mean difference says little."""
_WORDS = "The ship sails past the island while the crew counts gulls, barrels, ropes and stars until morning. "


async def check(server: ConnectedServer, tally: Tally) -> list[Draw]:
    """Ask with prompts of each length that the context has room for, and let the server score the answers.

    Returns:
        The answers with their likeliest tokens, if the server reports any.
    """
    limit = server.policy.info.max_model_len
    requests: list[tuple[int, int]] = []
    for length, answer in [(PROMPTS[0], ANSWER), *((length, SHORT_ANSWER) for length in PROMPTS[1:])]:
        if limit is None or length + answer + 1 <= limit:
            requests.append((length, answer))
        else:
            tally.skip("long", f"A prompt of {length} tokens does not fit into the context of {limit}.")
    if limit is not None and ROOM + 40 < limit <= LARGEST_CONTEXT:
        requests.append((limit - ROOM, ROOM - SPARE))
    else:
        tally.skip("long", f"A context of {limit} tokens was not filled.")
    differences = await asyncio.gather(*(_scored(server, tally, *each) for each in requests))
    signed = np.concatenate([np.zeros(0), *differences])
    if len(signed) >= LEAST_FOR_BIAS:
        center, bound = precision.center(signed), BIAS_SHARE * server.tolerance_nats
        problem = (
            f"{len(signed)} sampled tokens' logprobs are {center:+.4g} nats from the server's own scores in the mean "
            f"or median, more than {bound:.2g}: noise has no direction."
        )
        where = Where(sampling={"temperature": 1.0}, streamed=False)
        tally.require("rescored", abs(center) <= bound, problem, len(signed), where)
    k = top_of(server)
    if k < LEAST_TOP or server.needs_top_k:
        return []
    lengths = [length for length in PROMPTS[:2] if limit is None or length + ANSWER + 1 <= limit]
    prompts = [long_prompt(server, length) for length in lengths for _ in range(SAMPLES // len(lengths))]
    draws: list[Draw] = []
    for _ in range(MOST_ROUNDS):
        if sum(len(draw.ids) for draw in draws) < ENOUGH:
            draws += await asyncio.gather(*(_draw(server, prompt, k) for prompt in prompts))
    return draws


async def _draw(server: ConnectedServer, prompt: TokenIds, k: int) -> Draw:
    """Sample a long answer. It may end by itself: some servers never sample an end of turn that they must ignore."""
    sampling = server.sampling(max_new_tokens=ANSWER, temperature=1.0)
    request = TokenRequest(prompt, sampling, uuid.uuid4().hex, optional_outputs=OptionalOutputs(top_logprobs=k))
    return draw_of(await generate(server.policy.backend, request))


async def _scored(server: ConnectedServer, tally: Tally, length: int, answer: int) -> Any:
    """Sample after a prompt, and score the answer; return the differences with their sign, float64, shape (n,)."""
    backend = server.policy.backend
    prompt = long_prompt(server, length)
    sampling = server.sampling(max_new_tokens=answer, temperature=1.0, ignore_eos=True)
    response = await generate(backend, TokenRequest(prompt, sampling, uuid.uuid4().hex))
    if not semantics_of(server.policy.info, sampling).comparable_with_scoring():
        tally.skip("long", "The server's logprobs and its scores mean different things.")
        return np.zeros(0)
    scores = (await score(backend, np.concatenate([prompt, response.output_ids])))[length:]
    signed = response.logprobs.astype(np.float64) - scores
    worst = float(np.max(np.abs(signed), initial=0.0))
    at = int(np.argmax(np.abs(signed))) if len(signed) else 0
    problem = (
        f"after a prompt of {length} tokens, the logprob is {worst:.4g} nats from the server's own score, more than "
        f"{server.tolerance_nats:g}."
    )
    where = Where(None, at, int(response.output_ids[at]), {"temperature": 1.0}, streamed=False)
    tally.require("long", worst <= server.tolerance_nats, problem, len(signed), where)
    return signed


def long_prompt(server: ConnectedServer, length: int) -> TokenIds:
    """Return a prompt of exactly this many tokens: a long question, whose beginning is cut off."""
    text = _WORDS * (length // 8 + 1) + QUESTIONS[0]
    messages: list[Any] = [{"role": "user", "content": [{"text": text}]}]
    return server.policy.template.first_prompt(messages, None, None).ids[-length:]
