"""Penalties: what they add to reported logprobs, and to the choice of a greedy token.

A greedy answer needs no statistics: each of its tokens must be the likeliest of those that the server lists, after
penalties on the tokens before it. Only differences of logprobs are compared, so no normaliser is needed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from tito_conformance.checks import Tally, Where
from tito_conformance.sampler import LEAST_TOP, PENALISED, QUESTIONS, Draw, Question, prompt_of, top_of
from tito_conformance.target import ConnectedServer, can_stream
from tito_conformance.transforms import ask, row
from tito_core.backend.errors import BadRequestError
from tito_core.ledger.columns import TokenIds

TOKENS = 24
"""Tokens of an answer that tells whether logprobs include penalties."""
GREEDY_TOKENS = 80
"""Tokens of a greedy answer: enough that some occur several times."""
EVERY = 4
"""Every so many of them are compared with logprobs without penalties, where reported ones include penalties."""
NEAR_TIE_NATS = 0.02
"""Tokens this close may be chosen either way. Twice the tolerance counts if it is larger."""
GREEDY = Question("temperature 0", {"temperature": 0.0})


async def check(server: ConnectedServer, tally: Tally) -> bool | None:
    """Compare answers under penalties with what the same tokens have without them.

    Returns:
        Whether reported logprobs include penalties; None if unknown.
    """
    if top_of(server) < LEAST_TOP or server.needs_top_k:
        return None
    prompts = [prompt_of(server, text) for text in QUESTIONS[:2]]
    outcomes = [await _measured(server, tally, question, prompts[0]) for question in PENALISED]
    penalised = next((each for each in outcomes if each is not None), None)
    for number, prompt in enumerate(prompts):
        plain = await _answer(server, tally, GREEDY, prompt, number)
        if plain is None:
            continue
        _require_likeliest(server, tally, GREEDY, plain, penalised=True)
        # Half of the answer goes into the prompt, whose tokens must not count.
        longer = np.concatenate([prompt, plain.ids[: len(plain.ids) // 2]]).astype(np.int32)
        question = _drawn(server, number)
        draw = await _answer(server, tally, question, longer, number)
        if draw is None:
            continue
        if penalised is not False and server.policy.info.processed_logprobs is not None:
            found = await _compare(server, tally, question, longer, draw, range(EVERY, len(draw.ids), EVERY))
            penalised = found if penalised is None else penalised
        if penalised is None:
            tally.skip("sampler", "It was not measured whether logprobs include penalties.")
        else:
            _require_likeliest(server, tally, question, draw, penalised=penalised)
    return penalised


def _drawn(server: ConnectedServer, number: int) -> Question:
    random = np.random.default_rng([server.target.seed, number])
    presence, frequency = (round(float(random.uniform(0.2, 0.9)), 2) for _ in range(2))
    sampling = {"temperature": 0.0, "presence_penalty": presence, "frequency_penalty": frequency}
    return Question(f"temperature 0, presence_penalty {presence:g}, frequency_penalty {frequency:g}", sampling)


async def _measured(server: ConnectedServer, tally: Tally, question: Question, prompt: TokenIds) -> bool | None:
    """Return whether reported logprobs include penalties, after a comparison with those without."""
    if server.policy.info.processed_logprobs is None:
        return None
    try:
        draw = await ask(server, prompt, question.sampling, TOKENS)
    except BadRequestError as error:
        tally.skip("semantics", f"{question.name}: {str(error).partition(chr(10))[0]}")
        return None
    return await _compare(server, tally, question, prompt, draw, range(1, TOKENS))


async def _compare(
    server: ConnectedServer, tally: Tally, question: Question, prompt: TokenIds, draw: Draw, places: Sequence[int]
) -> bool | None:
    """Compare logprobs under penalties with those without; return whether they include penalties."""
    with_, without = await _distances(server, question, prompt, draw, places)
    if not with_:
        tally.skip("semantics", "No likely token was repeated, so penalties show in no logprob.")
        return None
    wrong = min(max(with_), math.inf if server.policy.info.processed_logprobs else max(without))
    problem = (
        f"Under {question.name}, the logprobs of likely tokens are {wrong:.3g} nats off those without penalties, moved "
        "by what the penalties say."
    )
    place = Where(sampling=question.sampling, streamed=draw.streamed)
    tally.require("semantics", wrong <= 2 * server.tolerance_nats, problem, len(with_), place)
    return max(with_) < max(without)


async def _distances(
    server: ConnectedServer, question: Question, prompt: TokenIds, draw: Draw, places: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return how far logprobs lie from those that penalties should make of the plain ones, and from the plain ones."""
    output = draw.ids.tolist()

    async def distances(at: int) -> tuple[float, float] | None:
        prefix = np.concatenate([prompt, draw.ids[:at]]).astype(np.int32)
        raw = row(await ask(server, prefix, {"temperature": 1.0}))
        offsets, reported = question.offsets(output[:at]), row(draw, at)
        moves = {token: offsets.get(token, 0.0) for token in reported if token in raw}
        if len(set(moves.values())) < 2:
            return None
        plain = [reported[token] - raw[token] for token in moves]
        moved = [value - offset for value, offset in zip(plain, moves.values(), strict=True)]
        return max(moved) - min(moved), max(plain) - min(plain)

    found = await asyncio.gather(*(distances(at) for at in places if at < len(output)))
    pairs = [each for each in found if each is not None]
    return [one for one, _ in pairs], [other for _, other in pairs]


async def _answer(
    server: ConnectedServer, tally: Tally, question: Question, prompt: TokenIds, number: int
) -> Draw | None:
    """Return an answer, streamed after the second prompt; None if the server refuses the parameters."""
    streamed = number == 1 and can_stream(server.backend)
    try:
        return await ask(server, prompt, question.sampling, GREEDY_TOKENS, streamed=streamed)
    except BadRequestError as error:
        tally.skip("sampler", f"{question.name}: {str(error).partition(chr(10))[0]}")
        return None


def _require_likeliest(
    server: ConnectedServer, tally: Tally, question: Question, draw: Draw, *, penalised: bool
) -> None:
    """Require that each token of a greedy answer is the likeliest one.

    Args:
        server: The server.
        tally: Counts the checks.
        question: The parameters.
        draw: The answer.
        penalised: Whether its logprobs include the penalties.
    """
    logs = draw.top_logprobs if penalised else draw.moved(draw.top_logprobs, question)
    own = draw.top_ids == draw.ids[:, None]
    unlisted = np.where(np.isfinite(draw.top_logprobs), draw.top_logprobs, math.inf).min(axis=1)
    chosen = np.where(own.any(axis=1), np.where(own, logs, -math.inf).max(axis=1), unlisted)
    chosen = np.where(np.isfinite(chosen), chosen, unlisted)  # listed, but among those that `draw_of` leaves out
    behind = logs.max(axis=1) - chosen
    near = max(NEAR_TIE_NATS, 2 * server.tolerance_nats)
    worst = int(np.argmax(behind))
    likelier = int(draw.top_ids[worst][int(np.argmax(logs[worst]))])
    problem = f"the token was chosen, but token {likelier} is {behind[worst]:.3g} nats likelier at {question.name}."
    place = Where(None, worst, int(draw.ids[worst]), question.sampling, draw.streamed)
    tally.require("sampler", bool(behind[worst] <= near), problem, len(draw.ids), place)
