"""What reported logprobs mean under penalties and after long prompts.

Only differences of two likely tokens' logprobs are compared, so no normaliser is needed: a penalty moves the tokens
that the answer holds. `sampler` judges logprobs at other temperatures and under truncations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tito_conformance.checks import Tally, Where, set_place, together
from tito_conformance.fixed import NEAR_TIE_NATS, SPARE, compare_scores, require_unbiased, same_prefix
from tito_conformance.sampler import (
    PENALISED,
    QUESTIONS,
    Draw,
    Question,
    draw_of,
)
from tito_conformance.target import ConnectedServer
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BadRequestError
from tito_core.backend.generate import score
from tito_core.backend.protocol import TokenResponse
from tito_core.ledger.columns import TokenIds

LONG_PROMPTS = (640, 1_089, 2_032)
"""Tokens of the long prompts: servers change their ways past 512, 1,024 and 2,048 (chunked prefill, graphs), and where
the last block of a cache is full (16 to 64 tokens: the first and the last prompt) or has one token. The last one's
answer crosses 2,048."""
CROSSING = (496, 32)
"""Tokens of a prompt and an answer that crosses 512."""
LONG_ANSWER = 300
"""Tokens of the long answer."""
LONG_SAMPLES = 4
"""Long answers at once, after the first two long prompts: they show the sampler, and what it makes of tokens that come
again."""
ENOUGH = 512
"""Sampled tokens after long prompts that show a wrong sampler: where answers end early, more of them are sampled."""
MOST_ROUNDS = 4
"""How often `LONG_SAMPLES` answers are sampled at most."""
SHORT_ANSWER = 48
"""Tokens of the answers to longer prompts."""
LARGEST_CONTEXT = 4_096
"""A larger context is not filled: on a CPU that takes minutes."""
ROOM = 40
"""Tokens that a prompt leaves of a full context: an answer, and the few more that engines need to score it."""
BIAS_SHARE = 0.1
"""Share of the tolerance that the mean and the median of all differences may reach: noise has no direction."""
QUESTION_TOKENS = 32
"""Tokens at the end of a long prompt: the question, and what the template writes after it."""
LEAST_FOR_BIAS = 100
"""Tokens below which a mean difference says little."""
MAX_TOKENS = 24
"""Longest answer of a measurement, in tokens, unless a question sets another one."""
PENALISED_COLDER = Question(
    "temperature 0.713, presence_penalty -1.987", {"temperature": 0.713, "presence_penalty": -1.987}
)
"""Logprobs at the temperature of the request have the penalties at this temperature, too."""


async def check_penalties(server: ConnectedServer, tally: Tally) -> bool | None:
    """Compare answers under penalties with what the same tokens have without them.

    Returns:
        Whether reported logprobs include penalties; None if unknown.
    """
    if not server.most_top:
        return None
    prompt = server.prompt_of(QUESTIONS[0])
    asked = (*PENALISED, PENALISED_COLDER) if server.policy.info.processed_logprobs else PENALISED
    outcomes = [await _penalised(server, tally, question, prompt) for question in asked]
    penalised = next((each for each in outcomes if each is not None), None)
    await check_occurrences(server, tally, prompt)
    return penalised


async def check_occurrences(server: ConnectedServer, tally: Tally, prompt: TokenIds) -> None:
    """Let a bias repeat one token until a penalty outweighs that: each occurrence in the answer counts, no other."""
    token = int(prompt[0])
    prefixes = [np.concatenate([prompt, np.full(count, token, np.int32)]) for count in range(MOST_OCCURRENCES + 1)]
    rows = await together(_likeliest(server, each) for each in prefixes)
    own = (await score(server.policy.backend, [*prefixes[-1].tolist(), token]))[len(prompt) :]
    others = [max((value for each, value in found.items() if each != token), default=math.nan) for found in rows]
    # What the bias must be for the token to come once more after so many occurrences.
    needed = [other - mine + at * FREQUENCY for at, (other, mine) in enumerate(zip(others, own.tolist(), strict=True))]
    near = max(NEAR_TIE_NATS, 2 * server.tolerance_nats)

    async def expect(penalty: str, count: int, least: float, tokens: int) -> None:
        bias = {"logit_bias": {str(token): round((needed[count] + least) / 2, 3)}}
        sampling = {"temperature": 0.0, f"{penalty}_penalty": FREQUENCY, "max_new_tokens": tokens, "extra": bias}
        answer = await ask_if_accepted(server, tally, "obeyed", prompt, sampling)
        if answer is not None:
            came = int(np.argmin([*(answer.output_ids == token), False]))
            problem = f"token {token} came {came} times before another one, not {tokens - 1 or 1} times."
            tally.require("obeyed", came == (tokens - 1 or 1), problem, 1, Where(sampling=sampling))

    if near < FREQUENCY / 2 and math.isfinite(needed[0]):  # the prompt holds the token, too, which must not count
        await expect("presence", 0, needed[0] + FREQUENCY, 1)
    for count in range(LEAST_OCCURRENCES, MOST_OCCURRENCES + 1):
        if needed[count] - max(needed[:count]) > 4 * near:
            await expect("frequency", count, max(needed[:count]), count + 1)
            return


FREQUENCY = 1.987
LEAST_OCCURRENCES, MOST_OCCURRENCES = 4, 8
"""How often a token comes before its frequency penalty ends that."""


async def check_lengths(server: ConnectedServer, tally: Tally) -> list[Draw]:
    """Ask with prompts of each length that the context has room for, and let the server score the answers.

    Returns:
        The answers with their likeliest tokens, if the server reports any.
    """
    limit = server.policy.info.max_model_len
    requests: list[tuple[int, int]] = []
    for length, answer in (CROSSING, *zip(LONG_PROMPTS, (LONG_ANSWER, SHORT_ANSWER, SHORT_ANSWER), strict=True)):
        if limit is None or length + answer + 1 <= limit:
            requests.append((length, answer))
        else:
            tally.skip("long", f"A prompt of {length} tokens does not fit into the context of {limit}.")
    if limit is not None and ROOM + 40 < limit <= LARGEST_CONTEXT:
        requests.append((limit - ROOM, ROOM - SPARE))
    else:
        tally.skip("long", f"A context of {limit} tokens was not filled.")
    found = await together(_scored(server, tally, *each) for each in requests)
    for (one, _), (other, _) in itertools.combinations([each for each in found if len(each[0])], 2):
        same_prefix(tally, one, other, min(len(one), len(other)) - QUESTION_TOKENS, server.tolerance_nats)
    if scored := [scores for scores, _ in found if len(scores)]:  # a short prompt fills no block, and no chunk
        alone = await score(server.policy.backend, long_prompt(server, CROSSING[0])[:QUESTION_TOKENS])
        same_prefix(tally, alone, scored[0], len(alone), server.tolerance_nats)
    signed = np.concatenate([np.zeros(0), *(each for _, each in found)])
    if len(signed) >= LEAST_FOR_BIAS:
        where = Where(sampling={"temperature": 1.0}, streamed=False)
        require_unbiased(server, tally, signed, BIAS_SHARE, where)
    if not server.most_top:
        return []
    lengths = [length for length in LONG_PROMPTS[:2] if limit is None or length + LONG_ANSWER + 1 <= limit]
    prompts = [long_prompt(server, length) for length in lengths for _ in range(LONG_SAMPLES // len(lengths))]
    draws, asked = list[Draw](), {"temperature": 1.0, "max_new_tokens": LONG_ANSWER}
    for _ in range(MOST_ROUNDS):
        if sum(len(draw.ids) for draw in draws) < ENOUGH:
            # They may end by themselves: some servers never sample an end of turn that they must ignore.
            answers = await together(ask(server, prompt, asked, likeliest=True) for prompt in prompts)
            draws += map(draw_of, answers)
    return draws


def long_prompt(server: ConnectedServer, length: int) -> TokenIds:
    """Return a prompt of exactly this many tokens: a long question, out of whose middle words are cut.

    All long prompts begin alike.
    """
    text = _WORDS * (LARGEST_CONTEXT // 16) + QUESTIONS[0]
    messages: list[Any] = [{"role": "user", "content": [{"text": text}]}]
    ids = server.policy.template.first_prompt(messages, None, None).ids
    return np.concatenate([ids[: length - QUESTION_TOKENS], ids[-QUESTION_TOKENS:]])


async def ask(
    server: ConnectedServer,
    prompt: TokenIds,
    sampling: Mapping[str, Any],
    *,
    streamed: bool = False,
    likeliest: bool = False,
) -> TokenResponse:
    """Return an answer of `MAX_TOKENS` at most, with the likeliest tokens of each place if the server lists them."""
    k = server.most_top if likeliest else 0
    params = server.sampling(**{"max_new_tokens": MAX_TOKENS, **sampling})
    return await server.answer(prompt, params, streamed=streamed, outputs=OptionalOutputs(top_logprobs=k))


async def ask_if_accepted(
    server: ConnectedServer, tally: Tally, check: str, prompt: TokenIds, sampling: Mapping[str, Any], **how: bool
) -> TokenResponse | None:
    """Return an answer; None, with the check counted as skipped, if the server refuses the parameters."""
    try:
        return await ask(server, prompt, sampling, **how)
    except BadRequestError as error:
        names = ", ".join(name for name in sampling if name not in ("temperature", "max_new_tokens"))
        tally.skip(check, f"{names}: {error}")
        return None


async def _likeliest(server: ConnectedServer, prompt: TokenIds) -> dict[int, float]:
    """Return the likeliest next tokens, likeliest first."""
    return row(draw_of(await ask(server, prompt, {"temperature": 1.0, "max_new_tokens": 1}, likeliest=True)))


def row(draw: Draw, at: int = 0) -> dict[int, float]:
    """Return the likeliest tokens of a place, likeliest first."""
    pairs = zip(draw.top_ids[at].tolist(), draw.top_logprobs[at].tolist(), strict=True)
    return {token: value for token, value in pairs if value > -math.inf}


async def _penalised(server: ConnectedServer, tally: Tally, question: Question, prompt: TokenIds) -> bool | None:
    """Return whether reported logprobs include penalties, after a comparison with those without."""
    if server.policy.info.processed_logprobs is None:
        return None
    answer = await ask_if_accepted(server, tally, "semantics", prompt, question.sampling, likeliest=True)
    if answer is None:
        return None
    with_, without = await _distances(server, question, prompt, draw_of(answer), range(1, MAX_TOKENS, 2))
    if not with_:
        tally.skip("semantics", "No likely token was repeated, so penalties show in no logprob.")
        return None
    info = server.policy.info  # what the server says of raw logprobs is held against it
    known = with_ if info.processed_logprobs else without if info.raw_before_penalties else None
    wrong = min(max(with_), max(without)) if known is None else max(known)
    problem = (
        f"Under {question.name}, the logprobs of likely tokens are {wrong:.3g} nats off those without penalties, moved "
        "by what the penalties say."
    )
    place = Where(sampling=question.sampling, streamed=False)
    tally.require("semantics", wrong <= 2 * server.tolerance_nats, problem, len(with_), place)
    return max(with_) < max(without)


async def _distances(
    server: ConnectedServer, question: Question, prompt: TokenIds, draw: Draw, places: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return how far logprobs lie from those that penalties should make of the plain ones, and from the plain ones."""
    output = draw.ids.tolist()
    heat = (question.temperature or 1.0) if server.policy.info.processed_logprobs else 1.0

    async def distances(at: int) -> tuple[float, float] | None:
        prefix = np.concatenate([prompt, draw.ids[:at]]).astype(np.int32)
        raw = await _likeliest(server, prefix)
        offsets, reported = question.offsets(output[:at]), row(draw, at)
        moves = {token: offsets.get(token, 0.0) for token in reported if token in raw}
        if len(set(moves.values())) < 2:
            return None
        plain = [heat * reported[token] - raw[token] for token in moves]
        moved = [value - offset for value, offset in zip(plain, moves.values(), strict=True)]
        return max(moved) - min(moved), max(plain) - min(plain)

    found = await together(distances(at) for at in places if at < len(output))
    pairs = [each for each in found if each is not None]
    return [one for one, _ in pairs], [other for _, other in pairs]


async def _scored(server: ConnectedServer, tally: Tally, length: int, answer: int) -> tuple[Any, Any]:
    """Sample after a prompt, and score both.

    Returns:
        The scores of the prompt, shape (length,), and the differences of the answer's with their sign, float64.
    """
    prompt = long_prompt(server, length)
    sampling = server.sampling(max_new_tokens=answer, temperature=1.0, ignore_eos=True)
    response = await server.answer(prompt, sampling)
    set_place(sampling={"temperature": 1.0}, streamed=False)
    ids, own = np.concatenate([prompt, response.output_ids]), response.logprobs
    scores = await compare_scores(server, tally, "long", ids, own, sampling, f"after a prompt of {length} tokens")
    if scores is None:
        tally.skip("long", "The server's logprobs and its scores mean different things.")
        return np.zeros(0), np.zeros(0)
    return scores[:length], own.astype(np.float64) - scores[length:]


_WORDS = "The ship sails past the island while the crew counts gulls, barrels, ropes and stars until morning. "
