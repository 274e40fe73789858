"""Check that the server samples from the distribution that it reports.

Answers are sampled in many ways: without a seed and with one, whole and streamed, after short and long prompts, at
several temperatures, under truncations and penalties. `bets` judges them, all in one go.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_conformance.bets import FALSE_ALARM, Bools, Floats, Places, by_rank, joined, richest
from tito_conformance.checks import Tally, Where, set_place, together
from tito_conformance.oracle import MASS_SLACK
from tito_conformance.target import LEAST_TOP, ConnectedServer, can_stream
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BadRequestError, task_group
from tito_core.backend.protocol import TokenResponse
from tito_core.ledger.columns import TokenIds

QUESTIONS = ("Tell me a story.", "Name some animals.", "Write about the sea.", "Invent a word.")
SAMPLES = 8
"""Samples of each prompt."""
TOKENS = 48
"""Tokens of each sample."""
AT_ONCE = 2
"""Samples of one prompt and question that are in progress at a time. All prompts and questions are sampled at once, so
that a server that mixes up the parameters of a batch shows it."""
HOT, COLD = 1.2, 0.3
"""Temperatures beyond which several questions are judged together: a clamped or rounded one shows in all of them."""
PERIODS = tuple(range(5, 25))
"""A server may sample one of so many tokens otherwise than the others, such as the last one of several steps."""
TIED_NATS = 1e-4
"""Tokens so close are tied: noise of float32 kernels decides which of them is listed, or above the sampled one."""
LEAST_UNCERTAIN = 40.0
"""Expected number of tokens other than the likeliest, below which a policy is too certain to be judged."""
KEPT_MASS_SLACK = 0.01
"""How far a truncation by mass may be off: engines sum probabilities in float32, in another order."""


@dataclass(frozen=True)
class Question:
    """Sampling parameters of one group of samples.

    Attributes:
        name: For the report.
        sampling: The parameters.
        seeded: Whether each request has a seed of its own.
    """

    name: str
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    seeded: bool = False

    @property
    def temperature(self) -> float:
        """The temperature."""
        return float(self.sampling["temperature"])

    @property
    def cuts(self) -> bool:
        """Whether it truncates."""
        return any(name in self.sampling for name in ("top_k", "top_p", "min_p"))

    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        """Return what its penalties add to the logits of some tokens, by id."""
        presence, frequency = (self.sampling.get(f"{name}_penalty", 0.0) for name in ("presence", "frequency"))
        if not presence and not frequency:
            return {}
        return {token: -presence - frequency * output.count(token) for token in output}


FREE = Question("temperature 1")
SEEDED = Question("temperature 1 with seeds", seeded=True)
PENALISED = (
    Question("presence_penalty -1.987", {"temperature": 1.0, "presence_penalty": -1.987}),
    Question("frequency_penalty -1.987", {"temperature": 1.0, "frequency_penalty": -1.987}),
)
"""Negative penalties make a sampled token likely to come again."""
RESTRICTED = (
    Question("temperature 0.053", {"temperature": 0.053}),
    Question("temperature 0.153", {"temperature": 0.153}),
    Question("temperature 0.513", {"temperature": 0.513}),
    Question("temperature 1.987, top_k 4", {"temperature": 1.987, "top_k": 4}),
    Question("temperature 1.987", {"temperature": 1.987}),
    Question("top_k 2", {"temperature": 1.0, "top_k": 2}),
    Question("top_p 0.513", {"temperature": 1.0, "top_p": 0.513}),
    Question("top_p 0.113", {"temperature": 1.0, "top_p": 0.113}),
    Question("min_p 0.287", {"temperature": 1.0, "min_p": 0.287}),
)
"""Each value has three digits, here and in all requests, so that one that is rounded on its way is seen."""
KINDS: tuple[dict[str, tuple[float, float]], ...] = (
    {"top_k": (3, 5), "top_p": (0.8, 0.95)},
    {"top_k": (3, 7)},
    {"top_p": (0.8, 0.95), "min_p": (0.02, 0.4)},
    {"top_k": (3, 5), "min_p": (0.02, 0.4)},
    {"top_p": (0.1, 0.95)},
    {"top_k": (3, 5), "top_p": (0.1, 0.3)},
)
"""Parameters that are combined, and the ranges of their values: in some combination each cuts what the others leave."""


def drawn(random: np.random.Generator, least: float, most: float) -> float:
    """Draw a value with three decimals that ends in 3."""
    return round(round(float(random.uniform(least, most)), 2) + 0.003, 3)


def drawn_questions(random: np.random.Generator, count: int = len(KINDS)) -> Iterator[Question]:
    """Draw combinations of sampling parameters, with values that no list in this file has."""
    for kind in KINDS[:count]:  # the least likely token that top_k leaves shows best in a flat distribution
        sampling: dict[str, Any] = {"temperature": 1.597 if "top_k" in kind else drawn(random, 0.2, 1.6)}
        for name, limits in kind.items():
            value = drawn(random, *limits)
            sampling[name] = int(value) if name == "top_k" else value
        yield Question(", ".join(f"{name} {value:g}" for name, value in sampling.items()), sampling)


async def check(
    server: ConnectedServer, tally: Tally, repeats: int, *, penalised: bool | None, long: Sequence[Draw] = ()
) -> None:
    """Sample, and compare the samples with the distribution that the server reports.

    `penalised` says whether reported logprobs include penalties; None if that was not measured. `long` are samples at
    temperature 1 after long prompts.
    """
    set_place()
    k = server.most_top
    if not k:
        few = "The server reports too few top logprobs to compare samples with."
        finite = "The server samples only with a finite top_k, whose effect on logprobs was not measured."
        tally.skip("sampler", finite if server.needs_top_k else few)
        return
    prompts = [server.prompt_of(question) for question in QUESTIONS]
    random = np.random.default_rng(server.target.seed)
    others = (*RESTRICTED, *drawn_questions(random), *PENALISED)
    outside: list[tuple[str, Where]] = []
    async with task_group() as tasks:
        free_tasks = [tasks.create_task(_draws(server, tally, each, FREE, k, SAMPLES * repeats)) for each in prompts]
        seeded_tasks = [tasks.create_task(_draws(server, tally, each, SEEDED, k, SAMPLES)) for each in prompts]
        other_tasks = [
            tasks.create_task(_restricted(server, tally, each, prompts, k, 2 * repeats, penalised, outside))
            for each in others
        ]
    groups, seeded = ([task.result() for task in each] for each in (free_tasks, seeded_tasks))
    for group in (*groups, *seeded):
        repeated(tally, group)
    flat = [draw for group in groups for draw in group]
    parts = [
        _places(server, FREE, [each for each in flat if not each.streamed], "not streamed"),
        _places(server, FREE, [each for each in flat if each.streamed], "streamed"),
        _places(server, SEEDED, [draw for group in seeded for draw in group]),
        _places(server, FREE, list(long), "after long prompts"),
    ]
    parts += [task.result() for task in other_tasks]
    vocabulary = server.policy.info.vocab_size or len(server.policy.tokenizer)
    judge(tally, joined(parts), vocabulary, (FREE, SEEDED, *others))
    for problem, where in outside:  # after the bets, which tell another temperature from another truncation
        tally.require("sampler", False, problem, 1, where)


def judge(tally: Tally, places: Places, vocabulary: int, questions: Sequence[Question] = (FREE,)) -> None:
    """Let every bet run on all samples, and count each question that says something."""
    win = richest(places, vocabulary)
    problem = (
        f"{win.subset}: {win.count} sampled tokens do not follow the distribution that the server states. A bet on "
        f"{win.alternative} won {shown(win.log_fortune)} to 1, where chance gives {shown(win.log_bar)} to 1 to any bet "
        f"once in {1 / FALSE_ALARM:,.0f} runs. {by_rank(places.only(win.subset))}"
    )
    streamed = {"not streamed": False, "streamed": True}.get(win.subset.rpartition(", ")[2])
    subset = win.subset.removesuffix(", streamed").removesuffix(", not streamed")
    sampling = next((each.sampling for each in questions if subset == f"At {each.name}"), None)
    tally.require("sampler", not win.convicts, problem, 0, Where(sampling=sampling, streamed=streamed))
    for name, mask in places.subsets.items():
        count = int(mask.sum())
        if not name.startswith("At "):
            continue
        uncertain = float(np.sum(1 - places.stated[mask].max(axis=1, initial=0.0)))
        if uncertain >= LEAST_UNCERTAIN:
            tally.require("sampler", True, "", count)
        elif count:
            tally.skip("sampler", f"{name}: too few sampled tokens tell anything, the policy is too certain.")


def repeated(tally: Tally, draws: Sequence[Draw]) -> None:
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
            f"same {len(ids)} tokens, {list(ids[:6])}...: by chance that happens with probability {shown(chance)}."
        )
        place = Where(sampling={"temperature": 1.0})
        tally.require("sampler", len(group) < 2 or chance > math.log(FALSE_ALARM), problem, 0, place)


@dataclass(frozen=True)
class Draw:
    """One sampled answer with the likeliest tokens in each place.

    Attributes:
        ids: int64, shape (n,).
        logprobs: Reported for the ids, float64, shape (n,).
        top_ids: int64, shape (n, k), likeliest first, -1 where there are fewer.
        top_logprobs: float64, shape (n, k), -inf where there are fewer.
        mass: Total probability of all tokens that the server listed, shape (n,).
        streamed: Whether the answer was streamed.
        edge: Logprob that no token without a finite one exceeds, shape (n,); None if unknown.
    """

    ids: NDArray[np.int64]
    logprobs: Floats
    top_ids: NDArray[np.int64]
    top_logprobs: Floats
    mass: Floats
    streamed: bool = False
    edge: Floats | None = None

    def listed(self, logs: Floats) -> Bools:
        """Return which sampled tokens have a finite logarithm among those of the likeliest tokens, shape (n,)."""
        found: Bools = ((self.top_ids == self.ids[:, None]) & np.isfinite(logs)).any(axis=1)
        return found

    def moved(self, logs: Floats, penalties: Question) -> Floats:
        """Return the logarithms with penalties on the tokens before each place."""
        found, output = logs.copy(), self.ids.tolist()
        for at in range(len(output)):
            for token, offset in penalties.offsets(output[:at]).items():
                found[at][self.top_ids[at] == token] += offset
        return found

    def places(
        self,
        logs: Floats,
        name: str,
        more: Sequence[str],
        ends: Sequence[int],
        *,
        alone: bool = False,
        heat: float = 1.0,
    ) -> Places:
        """Return the answer as places to bet on, in the subset `name` of all tokens and further ones.

        Args:
            logs: Logarithms of weights of the likeliest tokens, shape (n, k).
            name, more: Subsets.
            ends: Ids that end a turn.
            alone: Whether to judge among the listed tokens alone. Places in which another token was sampled are left
                out then, and so are all others that say nothing.
            heat: The temperature: those of several questions that are far from 1 are judged together, too.
        """
        own, listed = (self.top_ids == self.ids[:, None]) & np.isfinite(logs), self.listed(logs)
        n, stated = len(self.ids), np.exp(logs)
        seen, counts = np.zeros(logs.shape), Counter[int]()
        for at, token in enumerate(self.ids.tolist()):
            seen[at] = [counts[other] for other in self.top_ids[at].tolist()]
            counts[token] += 1
        keep = np.ones(n, bool)
        if alone:
            mass = stated.sum(axis=1, keepdims=True)
            stated = stated / np.where(mass > 0, mass, 1)
            keep = listed
        whole, first = np.ones(n, bool), np.arange(n) == 0
        subsets = {f"At {name}": whole, "All samples": whole, "First tokens of answers": first}
        subsets |= {f"At {name}, {each}": whole for each in more}
        far = {f"Temperatures above {HOT:g}": heat > HOT, f"Temperatures below {COLD:g}": heat < COLD}
        subsets |= {name: whole for name, holds in far.items() if holds}
        subsets |= {f"The last of every {each} tokens": np.arange(1, n + 1) % each == 0 for each in PERIODS}
        return Places(
            stated[keep],
            np.where(listed, own.argmax(axis=1), -1)[keep],
            np.isin(self.top_ids, list(ends))[keep],
            seen[keep],
            (np.zeros(n) if alone else -self.logprobs)[keep],
            {key: mask[keep] for key, mask in subsets.items()},
        )


def draw_of(response: TokenResponse, *, streamed: bool = False) -> Draw:
    """Return an answer with its likeliest tokens.

    Servers add the sampled token to the k likeliest, or put it in the place of the last one, and choose freely among
    tokens that are tied. So only tokens that are likelier than the one before the last are used: which these are does
    not depend on the sampled one.
    """
    top_ids, top = (response.columns[name].values for name in ("top_ids", "top_logprobs"))
    logs = np.where(top_ids == -1, -math.inf, np.nan_to_num(top.astype(np.float64), nan=-math.inf))
    mass = np.exp(logs).sum(axis=1)
    edge = logs[:, -2:-1] + TIED_NATS
    logs = np.where(logs > edge, logs, -math.inf)
    ids = response.output_ids.astype(np.int64)
    return Draw(ids, response.logprobs.astype(np.float64), top_ids.astype(np.int64), logs, mass, streamed, edge[:, 0])


async def _draws(
    server: ConnectedServer, tally: Tally, prompt: TokenIds, question: Question, k: int, count: int
) -> list[Draw]:
    """Sample a prompt `count` times, `AT_ONCE` at once.

    At temperature 1 alone half of the answers are streamed. Of others, half have a seed of their own, and half of these
    are streamed if there are no penalties. No two prompts or questions share a seed: the bets count on answers that are
    independent.
    """
    limit, free = asyncio.Semaphore(AT_ONCE), question in (FREE, SEEDED)
    streams = can_stream(server.backend) and question not in PENALISED and not question.seeded
    sampling = server.sampling(max_new_tokens=TOKENS, **question.sampling)
    middle = zlib.crc32(prompt.tobytes() + question.name.encode()) % (1 << 18) << 2

    async def one(number: int) -> Draw:
        seeded = question.seeded if free else number % 4 in (1, 2)
        # Some differ in low bits alone, some in the highest one of 32: PyTorch's generator for CPUs has no more.
        seed = number % 4 + middle + (number // 4 % 2 << 31) + (number // 8 << 20)
        own = sampling.model_copy(update={"seed": seed}) if seeded else sampling
        streamed = streams and number % (2 if free else 4) == 1
        async with limit:
            response = await server.answer(prompt, own, streamed=streamed, outputs=OptionalOutputs(top_logprobs=k))
        missing = np.argwhere(response.columns["top_ids"].values == -1)
        problem = f"output token {missing[0][0] if len(missing) else 0} has no logprob, or a sentinel, in its top list."
        full = not len(missing) or (question.cuts and server.policy.info.truncated_logprobs)
        tally.require("top", bool(full), problem, 0, Where(request_id=response.request_id))
        server.recorder.compared("ids", "distribution", response.request_id)
        server.recorder.compared("top", "samples", response.request_id)
        return draw_of(response, streamed=streamed)

    found = await together(one(number) for number in range(count))
    most = max(float(draw.mass.max(initial=0.0)) for draw in found)
    problem = f"At {question.name}, the {k} likeliest tokens of a place have a total probability of {most:.4g}."
    tally.require("top", most <= 1 + MASS_SLACK, problem, 1, Where(sampling=question.sampling))
    return found


def _places(server: ConnectedServer, question: Question, draws: Sequence[Draw], *names: str) -> Places:
    """Return samples of the whole distribution."""
    ends = list(server.policy.stop_token_ids)
    parts = (draw.places(draw.top_logprobs, question.name, names, ends) for draw in draws)
    return joined([_empty(), *parts])


def _empty() -> Places:
    nothing = np.zeros((0, LEAST_TOP))
    return Places(nothing, np.zeros(0, np.intp), nothing > 0, nothing, np.zeros(0), {"All samples": np.zeros(0, bool)})


async def _restricted(
    server: ConnectedServer,
    tally: Tally,
    question: Question,
    prompts: Sequence[TokenIds],
    k: int,
    count: int,
    penalised: bool | None,
    outside: list[tuple[str, Where]],
) -> Places:
    """Sample at a temperature, under a truncation or penalties, and return what is left of the listed tokens.

    Problems of sampled tokens that lie outside of the truncation are appended to `outside`.
    """
    info = server.policy.info
    unknown = {
        "the temperature": question.temperature != 1.0 and info.processed_logprobs is None,
        "a truncation": question.cuts and info.truncated_logprobs is None,
        "penalties": bool(question.offsets([0])) and penalised is None,
    }
    for what, is_unknown in unknown.items():
        if is_unknown:
            tally.skip("sampler", f"It was not measured whether logprobs include {what}.")
            return _empty()
    try:
        groups = await together(_draws(server, tally, each, question, k, count) for each in prompts)
    except BadRequestError as error:
        tally.skip("sampler", f"{question.name}: {error}")
        return _empty()
    ends = list(server.policy.stop_token_ids)
    vocabulary = info.vocab_size or len(server.policy.tokenizer)
    parts, tails = [_empty()], []
    whole = bool(info.processed_logprobs) and not question.cuts and (penalised or not question.offsets([0]))
    for draw in (draw for group in groups for draw in group):
        logs = draw.top_logprobs if penalised else draw.moved(draw.top_logprobs, question)
        weights = tempered(logs, 1.0 if info.processed_logprobs else question.temperature, vocabulary, draw.edge)
        logs = weights.logs
        if not question.cuts and not info.processed_logprobs and question.temperature > 1:
            tails.append((~draw.listed(logs), weights.least / (weights.listed + weights.least)))
        if question.cuts and not info.truncated_logprobs:
            near = 2 * server.tolerance_nats
            may, must = left(question.sampling, weights, near)
            outside += _outside(question, draw, may)
            certain = (may == must).all(axis=1, keepdims=True)  # near-ties at the edge may fall either way
            logs = np.where(may & certain, logs, -math.inf)
        parts.append(draw.places(logs, question.name, (), ends, alone=not whole, heat=question.temperature))
    _require_tail(tally, question, tails)
    return joined(parts)


def _require_tail(tally: Tally, question: Question, tails: Sequence[tuple[Bools, Floats]]) -> None:
    """Bet that tokens beyond the listed ones come half as often as they must at least, at a high temperature."""
    if tails:
        beyond, least = (np.concatenate(each) for each in zip(*tails, strict=True))
        logs = np.where(beyond, math.log(0.5), np.log((1 - 0.5 * least) / (1 - least)))
        problem = (
            f"at {question.name}, {int(beyond.sum())} of {len(beyond)} sampled tokens are beyond the likeliest, and at "
            f"least {float(least.sum()):.0f} were expected: a lower temperature, or a truncation that was not asked."
        )
        won = float(np.max(np.cumsum(logs), initial=0.0))
        tally.require("sampler", won < -math.log(FALSE_ALARM), problem, 0, Where(sampling=question.sampling))


def _outside(question: Question, draw: Draw, may: Bools) -> Iterator[tuple[str, Where]]:
    """Yield each sampled token that a truncation leaves out; it need not be among the likeliest that are listed."""
    listed = (draw.top_ids == draw.ids[:, None]) & np.isfinite(draw.top_logprobs)
    full = (may | ~np.isfinite(draw.top_logprobs)).all(axis=1)  # then unlisted tokens may be left, too
    inside = np.where(listed.any(axis=1), (listed & may).any(axis=1), full)
    for at in np.flatnonzero(~inside):
        likeliest = list(zip(draw.top_ids[at][:4].tolist(), draw.top_logprobs[at][:4].round(3).tolist(), strict=True))
        problem = (
            f"the token has the logprob {draw.logprobs[at]:.4g}, and {question.name} leaves it out; the likeliest "
            f"tokens there are {likeliest}."
        )
        yield problem, Where(None, int(at), int(draw.ids[at]), question.sampling, draw.streamed)


@dataclass(frozen=True)
class Weights:
    """Listed tokens before a truncation.

    Attributes:
        logs: Logarithms of the tokens' weights, shape (n, k), -inf where there are fewer.
        listed: Weight of all listed tokens, shape (n,).
        unlisted: Largest possible weight of all others, shape (n,).
        least: Smallest possible weight of all others, shape (n,).
    """

    logs: Floats
    listed: Floats
    unlisted: Floats
    least: Floats


def tempered(logprobs: Floats, temperature: float, vocabulary: int, edge: Floats | None = None) -> Weights:
    """Return the weights of tokens at a temperature, from their logprobs at temperature 1, shape (n, k).

    The weight of N tokens of total probability q is at most N^(1-1/T) q^(1/T) (a power mean), and for T < 1, where no
    token is more likely than `edge` or the last listed one, p, at most q p^(1/T-1). For T > 1 that is the least.
    """
    logs = logprobs / temperature
    rest = np.clip(1 - np.exp(logprobs).sum(axis=1), 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = vocabulary ** (1 - 1 / temperature) * rest ** (1 / temperature)
        last = np.where(np.isfinite(logprobs), logprobs, 0).min(axis=1, initial=0.0) if edge is None else edge
        even = rest * np.exp(last * (1 / temperature - 1))
        most, least = (spread, even) if temperature >= 1 else (even, spread)
    return Weights(logs, np.exp(logs).sum(axis=1), np.nan_to_num(most), np.nan_to_num(least))


def left(
    sampling: Mapping[str, Any], weights: Weights, near: float, slack: float = KEPT_MASS_SLACK
) -> tuple[Bools, Bools]:
    """Return which listed tokens a truncation may leave, and which it must leave, each of shape (n, k).

    Engines apply `top_p` to the probabilities before or after `top_k`; both are allowed.

    Args:
        sampling: The parameters.
        weights: The tokens' weights.
        near: Tokens this close to the edge may fall either way, in nats.
        slack: So may tokens this close to the edge in mass.
    """
    return _left(sampling, weights, near, slack, joint=True), _left(sampling, weights, -near, -slack, joint=False)


def _left(sampling: Mapping[str, Any], weights: Weights, near: float, slack: float, *, joint: bool) -> Bools:
    logs = weights.logs
    others = ~np.eye(logs.shape[1], dtype=bool)
    before = (logs[:, None, :] > logs[:, :, None] + near) & others  # by place, token, and token before it
    rank = before.sum(axis=2)
    found: Bools = np.isfinite(logs)
    k = int(sampling.get("top_k", -1))
    if k > 0:
        found &= rank < k
    if (p := float(sampling.get("top_p", 1.0))) < 1:
        total = weights.listed + (weights.unlisted if joint else 0.0)
        if k > 0 and not joint:
            total = np.where(rank < k, np.exp(logs), 0).sum(axis=1)
        found &= (before * np.exp(logs)[:, None, :]).sum(axis=2) < (p + slack) * total[:, None]
    if share := float(sampling.get("min_p", 0.0)):
        found &= logs >= math.log(share) + logs.max(axis=1, keepdims=True, initial=-math.inf) - near
    return found


def shown(log: float) -> str:
    """Return a number by its logarithm, as a power of ten."""
    return f"1e{log / math.log(10):.0f}"
