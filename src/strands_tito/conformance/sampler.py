"""Check that the server samples from the distribution that it reports, with a known rate of false alarms.

Each test is on the ranks that the server's own likeliest tokens give: under the stated distribution the mass of all
likelier tokens, plus a random share of the token's own, is uniform on [0, 1] (the probability integral transform), and
independent from token to token, whatever was sampled before. A greedy server, another temperature, a smaller `top_k` or
`top_p`, a uniform sampler, or answers that repeat without a seed break this.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strands_tito.conformance.laws import Tally
from strands_tito.conformance.target import ConnectedServer
from tito_core.backend import OptionalOutputs
from tito_core.backend.calls import generate
from tito_core.backend.protocol import TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds

FALSE_ALARM = 1e-6
"""Probability with which one test calls a sound server broken."""
MOST_TOP = 20
"""Likeliest tokens that are asked for at most: vLLM's default limit."""
AT_ONCE = 8
TOKENS = 32
"""Tokens of each sample."""
LEAST_UNCERTAIN = 40.0
"""Expected number of tokens other than the likeliest, below which a policy is too certain to say anything."""
MASS_SLACK = 0.01
"""How far a truncation by mass may be off: engines sum probabilities in float32, in another order."""
TAILS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Ranks up to which sampled tokens are counted."""
MIXTURES = (0.002, 0.01, 0.05)
"""Shares of uniformly sampled tokens that are bet on."""
QUESTIONS = ("Tell me a story.", "Name some animals.", "Write about the sea.", "Invent a word.")


@dataclass(frozen=True)
class Draw:
    """One sampled answer with the likeliest tokens in each place.

    Attributes:
        ids: int64, shape (n,).
        logprobs: Reported for the ids, float64, shape (n,).
        top_ids: int64, shape (n, k), likeliest first, -1 where there are fewer.
        top_logprobs: float64, shape (n, k), -inf where there are fewer.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]


@dataclass(frozen=True)
class Question:
    """Sampling parameters of one group of samples.

    Attributes:
        name: For the report.
        sampling: The parameters.
        seeded: Whether each request has a seed of its own.
    """

    name: str
    sampling: dict[str, Any]
    seeded: bool = False


FREE = Question("temperature 1", {"temperature": 1.0})
SEEDED = Question("temperature 1 with seeds", {"temperature": 1.0}, seeded=True)
RESTRICTED = (
    Question("temperature 0.5", {"temperature": 0.5}),
    Question("temperature 1.5", {"temperature": 1.5}),
    Question("top_k 2", {"temperature": 1.0, "top_k": 2}),
    Question("top_p 0.5", {"temperature": 1.0, "top_p": 0.5}),
    Question("min_p 0.3", {"temperature": 1.0, "min_p": 0.3}),
)


async def check(server: ConnectedServer, tally: Tally, repeats: int) -> None:
    """Sample, and compare the samples with the distribution that the server reports.

    Args:
        server: The server.
        tally: Counts the checks.
        repeats: Scales the number of samples: 8 of each prompt and repeat.
    """
    limit = server.policy.info.capabilities.top_logprobs
    k = MOST_TOP if limit is None else min(MOST_TOP, limit)
    if k < 2:
        tally.skip("sampler", "The server reports no top logprobs to compare samples with.")
        return
    prompts = [_prompt(server, question) for question in QUESTIONS]
    random = np.random.default_rng(server.target.seed)
    free = [await _draws(server, prompt, FREE, k, AT_ONCE * repeats) for prompt in prompts]
    for group in free:
        _repeated(tally, group)
    seeded = [await _draws(server, prompt, SEEDED, k, AT_ONCE) for prompt in prompts]
    for group in seeded:
        _repeated(tally, group)
    of_seeds = [draw for group in seeded for draw in group]
    _held(tally, SEEDED, of_seeds, [draw.top_logprobs for draw in of_seeds], 1.0, random)
    flat = [draw for group in free for draw in group]
    _held(tally, FREE, flat, [draw.top_logprobs for draw in flat], 1.0, random)
    _not_uniform(server, tally, flat)
    for question in RESTRICTED:
        drawn: list[Draw] = []
        for prompt in prompts:
            drawn += await _draws(server, prompt, question, k, 2 * repeats)
        _restricted(server, tally, question, drawn, random)


def _prompt(server: ConnectedServer, question: str) -> TokenIds:
    messages: list[Any] = [{"role": "user", "content": [{"text": question}]}]
    return server.policy.template.first_prompt(messages, None, None).ids


async def _draws(server: ConnectedServer, prompt: TokenIds, question: Question, k: int, count: int) -> list[Draw]:
    """Sample a prompt `count` times, `AT_ONCE` concurrently, each with its own seed or without one."""
    limit = asyncio.Semaphore(AT_ONCE)
    sampling = server.policy.sampling(SamplingParams(max_new_tokens=TOKENS, **question.sampling))

    async def one(number: int) -> TokenResponse:
        own = sampling.model_copy(update={"seed": number}) if question.seeded else sampling
        request = TokenRequest(prompt, own, uuid.uuid4().hex, optional_outputs=OptionalOutputs(top_logprobs=k))
        async with limit:
            return await generate(server.policy.backend, request)

    return [_draw(response) for response in await asyncio.gather(*(one(number) for number in range(count)))]


def _draw(response: TokenResponse) -> Draw:
    top_ids, top = (response.columns[name].values for name in ("top_ids", "top_logprobs"))
    logprobs = np.where(top_ids == -1, -math.inf, np.nan_to_num(top.astype(np.float64), nan=-math.inf))
    ids = response.output_ids.astype(np.int64)
    return Draw(ids, response.logprobs.astype(np.float64), top_ids.astype(np.int64), logprobs)


def _repeated(tally: Tally, draws: Sequence[Draw]) -> None:
    """Refuse answers to one prompt that agree more often than chance allows."""
    groups: dict[tuple[int, ...], list[Draw]] = {}
    for draw in draws:
        groups.setdefault(tuple(draw.ids.tolist()), []).append(draw)
    for ids, group in groups.items():
        # m equal answers among n: at most C(n, m) ways, each of probability p^m summed over answers, so p^(m-1) here.
        ways = math.log(math.comb(len(draws), len(group)))
        chance = ways + (len(group) - 1) * float(np.minimum(group[0].logprobs, 0).sum())
        problem = (
            f"{len(group)} of {len(draws)} answers to one prompt at temperature 1, of no or other seeds, are the "
            f"same {len(ids)} tokens, {list(ids[:6])}...: by chance that happens with probability {_shown(chance)}."
        )
        tally.require("sampler", len(group) < 2 or chance > math.log(FALSE_ALARM), problem)


def _held(
    tally: Tally,
    question: Question,
    draws: Sequence[Draw],
    logits: Iterable[NDArray[np.float64]],
    total: float | None,
    random: np.random.Generator,
) -> None:
    """Hold sampled tokens to a distribution over the likeliest ones.

    Args:
        tally: Counts the check.
        question: What was asked for.
        draws: The samples.
        logits: For each sample the logarithm of each likeliest token's weight, shape (n, k), -inf where it is left out.
        total: The weight of all tokens, 1 where the logits are logprobs; None judges among the likeliest alone.
        random: Spreads a token over its own mass.
    """
    places: list[NDArray[np.float64]] = []
    uncertain = 0.0
    for draw, each in zip(draws, logits, strict=True):
        found, others = _transformed(draw, each, total, random)
        places.append(found)
        uncertain += others
    spread = np.concatenate(places) if places else np.zeros(0)
    if uncertain < LEAST_UNCERTAIN:
        tally.skip("sampler", f"At {question.name} too few sampled tokens tell anything: the policy is too certain.")
        return
    apart = _furthest(spread)
    bound = math.sqrt(math.log(2 / FALSE_ALARM) / 2 / len(spread))
    problem = (
        f"At {question.name}, {len(spread)} sampled tokens do not follow the distribution that the server states: "
        f"their ranks lie {apart:.3f} from it (Kolmogorov-Smirnov), more than {bound:.3f}, which chance exceeds once "
        f"in {1 / FALSE_ALARM:,.0f} runs."
    )
    tally.require("sampler", apart <= bound, problem, len(spread))
    at, share, surprise = _most_surprising(spread)
    problem = (
        f"At {question.name}, {share:.1%} of {len(spread)} sampled tokens have a rank up to {at:g}, where the "
        f"distribution that the server states has {at:.1%}: a smaller or larger tail than chance allows."
    )
    tally.require("sampler", surprise <= math.log(2 * len(TAILS) / FALSE_ALARM), problem)


def _most_surprising(places: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the threshold at which a share of uniform numbers is least likely, that share, and -log of a bound on it.

    By Chernoff's bound a share s of n numbers is at least as far from x with probability exp(-n KL(s, x)) at most. The
    tails, which a truncation cuts off, show here sooner than in the Kolmogorov-Smirnov distance.
    """
    found = [(at, float(np.mean(places <= at))) for at in TAILS]
    return max(((at, share, len(places) * _divergence(share, at)) for at, share in found), key=lambda each: each[2])


def _divergence(share: float, at: float) -> float:
    """Return the Kullback-Leibler divergence of two coins, in nats."""
    pairs = ((share, at), (1 - share, 1 - at))
    return sum(one * math.log(one / other) for one, other in pairs if one > 0)


def _transformed(
    draw: Draw, logits: NDArray[np.float64], total: float | None, random: np.random.Generator
) -> tuple[NDArray[np.float64], float]:
    """Return the probability integral transform of a sample's tokens, and how many were expected not to be the first.

    Tokens that are not among the likeliest lie in what those leave; where `total` is None they are left out, and so are
    places in which one token alone is left.
    """
    weights = np.exp(logits)
    mass = weights.sum(axis=1) if total is None else np.maximum(weights.sum(axis=1), total)
    own = draw.top_ids == draw.ids[:, None]
    listed = (own & (weights > 0)).any(axis=1)
    chosen = np.where(listed, np.where(own, logits, -math.inf).max(axis=1, initial=-math.inf), -math.inf)
    above = np.where(listed, (weights * (logits > chosen[:, None])).sum(axis=1), weights.sum(axis=1))
    share = np.where(listed, (weights * (logits == chosen[:, None])).sum(axis=1), mass - above)
    kept = (mass > 0) & (share > 0) & (listed if total is None else np.ones(len(mass), bool))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = (above + random.random(len(mass)) * share) / mass
        first = weights.max(axis=1, initial=0.0) / mass
    return found[kept], float(np.sum(1 - first[kept]))


def _furthest(places: NDArray[np.float64]) -> float:
    """Return the Kolmogorov-Smirnov distance of numbers from the uniform distribution on [0, 1]."""
    ordered, n = np.sort(places), len(places)
    steps = np.arange(n)
    return float(max(np.max((steps + 1) / n - ordered), np.max(ordered - steps / n)))


def _not_uniform(server: ConnectedServer, tally: Tally, draws: Sequence[Draw]) -> None:
    """Bet that some tokens are sampled uniformly from the vocabulary: a martingale, which chance seldom makes rich.

    Under the stated distribution p, the mean of (1/V)/p(token) is at most 1, so by Ville's inequality a fortune of
    1/alpha is ever reached with probability alpha at most.
    """
    size = server.policy.info.vocab_size or len(server.policy.tokenizer)
    ratios = np.exp(-np.concatenate([draw.logprobs for draw in draws])) / size
    for share in MIXTURES:
        fortune = np.cumsum(np.log1p(share * (ratios - 1)))
        richest = float(np.max(fortune, initial=0.0))
        rare = int(np.count_nonzero(ratios > 1))
        problem = (
            f"{rare} of {len(ratios)} tokens sampled at temperature 1 are less likely than a token drawn blindly from "
            f"the vocabulary: a bet on it won {_shown(richest)} to 1, where chance allows {1 / FALSE_ALARM:,.0f} to 1."
        )
        tally.require("sampler", richest < math.log(len(MIXTURES) / FALSE_ALARM), problem)


def _restricted(
    server: ConnectedServer, tally: Tally, question: Question, draws: Sequence[Draw], random: np.random.Generator
) -> None:
    """Hold samples to a temperature or a truncation: no token outside of it, and those inside as often as stated."""
    info, temperature = server.policy.info, float(question.sampling["temperature"])
    cuts = len(question.sampling) > 1
    if temperature != 1.0 and info.processed_logprobs is None:
        tally.skip("sampler", "It was not measured whether logprobs include the temperature.")
        return
    if cuts and info.truncated_logprobs is None:
        tally.skip("sampler", "It was not measured whether logprobs include a truncation.")
        return
    logits = []
    for draw in draws:
        stated = draw.top_logprobs if info.processed_logprobs else draw.top_logprobs / temperature
        if cuts and not info.truncated_logprobs:
            near = 2 * server.target.tolerance_nats
            most, least = (_left(question.sampling, stated, sign * near, sign * MASS_SLACK) for sign in (1, -1))
            _inside(tally, question, draw, near)
            certain = (most == least).all(axis=1, keepdims=True)  # near-ties at the edge may fall either way
            stated = np.where(most & certain, stated, -math.inf)
        logits.append(stated)
    _held(tally, question, draws, logits, None, random)


def _left(sampling: dict[str, Any], stated: NDArray[np.float64], near: float, slack: float) -> NDArray[np.bool_]:
    """Return which of the likeliest tokens a truncation leaves, by the stated logprobs.

    Args:
        sampling: The parameters, one of them a truncation.
        stated: Logprobs, shape (n, k).
        near: Tokens this much less likely than the last one are left, too, in nats.
        slack: So are tokens after this much more mass.
    """
    others = ~np.eye(stated.shape[1], dtype=bool)
    before = (stated[:, None, :] > stated[:, :, None] + near) & others  # by place, token, and token before it
    left: NDArray[np.bool_] = np.isfinite(stated)
    if k := sampling.get("top_k"):
        left &= before.sum(axis=2) < k
    if p := sampling.get("top_p"):
        left &= (before * np.exp(stated)[:, None, :]).sum(axis=2) < p + slack
    if share := sampling.get("min_p"):
        left &= stated >= math.log(share) + stated.max(axis=1, keepdims=True, initial=-math.inf) - near
    return left


def _inside(tally: Tally, question: Question, draw: Draw, near: float) -> None:
    """Refuse a sampled token that a truncation leaves out; it need not be among the likeliest that are listed."""
    sampling, own = question.sampling, draw.logprobs[:, None]
    before = draw.top_logprobs > own + near
    inside = np.ones(len(draw.ids), bool)
    if k := sampling.get("top_k"):
        inside &= before.sum(axis=1) < k
    if p := sampling.get("top_p"):
        inside &= (before * np.exp(draw.top_logprobs)).sum(axis=1) < p + MASS_SLACK
    if share := sampling.get("min_p"):
        inside &= draw.logprobs >= math.log(share) + draw.top_logprobs.max(axis=1, initial=-math.inf) - near
    for at in np.flatnonzero(~inside):
        likeliest = list(zip(draw.top_ids[at][:4].tolist(), draw.top_logprobs[at][:4].round(3).tolist(), strict=True))
        problem = (
            f"At {question.name}, output token {at} is {draw.ids[at]} with logprob {draw.logprobs[at]:.4g}, which "
            f"{question.name} leaves out; the likeliest tokens there are {likeliest}."
        )
        tally.require("sampler", False, problem)
    tally.require("sampler", True, "", len(draw.ids))


def _shown(log: float) -> str:
    return f"1e{log / math.log(10):.0f}"
