"""Bets against the distribution that a server reports, with a known rate of false alarms.

Each alternative distribution is a bettor, who multiplies a fortune of 1 by the likelihood ratio of every sampled token.
If tokens are sampled as reported, a fortune is a martingale, however long answers are and whatever stops them, so it
reaches 1 / p with a probability of at most p (Ville's inequality). Many bets on many subsets of the tokens run side by
side; their number raises the bar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FALSE_ALARM = 1e-6
"""Probability with which one run calls a sound server broken by any of its bets, or by one other test."""
DOUBT = 0.05
"""Share of a bet that stays on the stated distribution, so that one token does not ruin it."""
MOST_MOVED = 50.0
"""Most nats by which a bet moves a token, so that its weight stays finite."""
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Places:
    """Sampled tokens, each with the stated distribution over the likeliest tokens in its place.

    Attributes:
        stated: Probabilities of the listed tokens, shape (n, k), each row at most 1 in all, 0 where there are fewer.
        chosen: Index of the sampled token in its row, -1 if it is not listed, shape (n,).
        ends: Which listed tokens end a turn, shape (n, k).
        seen: How often each listed token is in the answer already, shape (n, k).
        surprise: Minus the reported logprob of the sampled token, shape (n,).
        subsets: Sets of tokens that are judged on their own, by name, each of shape (n,).
    """

    stated: Floats
    chosen: NDArray[np.intp]
    ends: Bools
    seen: Floats
    surprise: Floats
    subsets: Mapping[str, Bools]

    def __len__(self) -> int:
        return len(self.chosen)

    def only(self, subset: str) -> Places:
        """Return the tokens of a subset, or all tokens if no subset has the name."""
        of = self.subsets.get(subset, np.ones(len(self), bool))
        return Places(self.stated[of], self.chosen[of], self.ends[of], self.seen[of], self.surprise[of], {})

    @property
    def rest(self) -> Floats:
        """Probability of all tokens that are not listed, shape (n,)."""
        left: Floats = np.clip(1 - self.stated.sum(axis=1), 0, 1)
        return left


def joined(parts: Sequence[Places]) -> Places:
    """Concatenate places. A subset that a part lacks holds none of its tokens."""
    width = max(part.stated.shape[1] for part in parts)

    def wide(name: str) -> NDArray[Any]:
        tables = [getattr(part, name) for part in parts]
        return np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in tables])

    names = dict.fromkeys(name for part in parts for name in part.subsets)
    empty = {len(part): np.zeros(len(part), bool) for part in parts}
    return Places(
        wide("stated"),
        np.concatenate([part.chosen for part in parts]),
        wide("ends"),
        wide("seen"),
        np.concatenate([part.surprise for part in parts]),
        {name: np.concatenate([part.subsets.get(name, empty[len(part)]) for part in parts]) for name in names},
    )


@dataclass(frozen=True)
class Win:
    """The richest bet.

    Attributes:
        alternative: What it bet on.
        subset: The tokens on which it bet.
        count: Number of these tokens.
        log_fortune: Logarithm of what it made of 1.
        log_bar: Logarithm of what chance makes of any of the bets once in 1 / `FALSE_ALARM` runs.
    """

    alternative: str
    subset: str
    count: int
    log_fortune: float
    log_bar: float

    @property
    def convicts(self) -> bool:
        """Whether chance does not explain it."""
        return self.log_fortune > self.log_bar


def richest(places: Places, vocabulary: int) -> Win:
    """Return the bet that won most, on any subset and at any time."""
    best, count = Win("nothing", "all", 0, 0.0, 0.0), 0
    for name, logs in log_ratios(places, vocabulary):
        for subset, mask in places.subsets.items():
            count += 1
            if mask.any():
                fortune = float(np.max(np.cumsum(logs[mask]), initial=0.0))
                if fortune > best.log_fortune:
                    best = Win(name, subset, int(mask.sum()), fortune, 0.0)
    bar = math.log(max(count, 1) / FALSE_ALARM)
    return Win(best.alternative, best.subset, best.count, best.log_fortune, bar)


def by_rank(places: Places) -> str:
    """Return a sentence on which tokens came too often or too seldom, by their rank in the stated distribution."""
    order = np.argsort(-places.stated, axis=1, kind="stable")
    stated = [*np.take_along_axis(places.stated, order, axis=1).sum(axis=0), float(places.rest.sum())]
    listed = places.chosen >= 0
    ranks = np.where(listed, np.argmax(order == places.chosen[:, None], axis=1), len(stated) - 1)
    came = np.bincount(ranks, minlength=len(stated))
    beyond = next((rank for rank in range(1, len(stated)) if not came[rank:].sum()), len(stated))
    if (lost := sum(stated[beyond:])) >= LEAST_LOST:
        return f"Tokens of rank {beyond + 1} and beyond never came, {lost:.0f} were expected: top_k {beyond}?"
    furthest = sorted(
        range(len(stated)), key=lambda rank: -abs(came[rank] - stated[rank]) / math.sqrt(stated[rank] + 1)
    )
    names = {len(stated) - 1: "not listed"}
    counts = [f"{came[rank]} {names.get(rank, f'of rank {rank + 1}')} ({stated[rank]:.0f})" for rank in furthest[:3]]
    ended = int((places.ends[np.arange(len(places)), np.maximum(places.chosen, 0)] & listed).sum())
    ends = float(np.where(places.ends, places.stated, 0).sum())
    return f"Sampled tokens, and how many were expected: {', '.join(counts)}, {ended} ends of turn ({ends:.0f})."


def _ratios(places: Places, weigh: Weigh, doubt: float) -> Floats:
    """Return what a bet multiplies its fortune by, for each listed token, shape (n, k)."""
    weights, mass = weigh(places), places.stated.sum(axis=1, keepdims=True)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = (weights / total) / (places.stated / mass)
    found: Floats = doubt + (1 - doubt) * np.where((places.stated > 0) & (total > 0), ratio, 1.0)
    return found


def center(signed: NDArray[Any]) -> float:
    """Return the mean or the median of differences with their signs, whichever is further from 0."""
    return max(float(np.mean(signed, dtype=np.float64)), float(np.median(signed)), key=abs)


def log_ratios(places: Places, vocabulary: int) -> Iterator[tuple[str, Floats]]:
    """Yield each alternative with the logarithm of its probability by the stated one, for each sampled token."""
    n = len(places)
    listed = places.chosen >= 0
    at = (np.arange(n), np.maximum(places.chosen, 0))
    for name, bet in ALTERNATIVES.items():
        yield name, _log(np.where(listed, _ratios(places, *bet)[at], 1.0))
    rest = places.rest
    for mass in NUCLEI:
        weights = _nucleus(mass)(places)
        beyond = 1 - rest < mass  # whether tokens that are not listed are left, too
        kept = weights.sum(axis=1) + np.where(beyond, rest, 0)
        inside = np.where(listed, weights[at] > 0, beyond)
        yield f"top_p {mass:g}", _log(DOUBT + (1 - DOUBT) * np.where(inside, 1 / np.maximum(kept, DOUBT), 0))
    for times in OF_THE_REST:
        more = np.minimum(times, 0.5 / np.maximum(rest, 1e-12)) if times > 1 else np.full(n, times)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(listed, (1 - more * rest) / (1 - rest), more)
        yield (
            f"tokens outside the likeliest {times:g} times as likely",
            _log(np.where((rest < 0.5) & (rest > 0), ratio, 1)),
        )
    blind = np.exp(np.minimum(places.surprise, 700.0)) / vocabulary
    for share in BLIND:
        yield f"{share:.1%} of all tokens drawn blindly from the vocabulary", _log((1 - share) + share * blind)


def _log(ratio: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        found: Floats = np.log(ratio)
    return found


Weigh = Callable[[Places], Floats]
"""Returns a weight for each listed token, shape (n, k); the alternative is proportional to it in each row."""


def _tempered(temperature: float) -> Weigh:
    def weigh(places: Places) -> Floats:
        with np.errstate(divide="ignore"):
            return np.exp(np.log(places.stated) / temperature)

    return weigh


def _likeliest(count: int) -> Weigh:
    def weigh(places: Places) -> Floats:
        ordered = -np.sort(-places.stated, axis=1)
        least = ordered[:, min(count, ordered.shape[1]) - 1, None]
        return np.where(places.stated >= least, places.stated, 0)

    return weigh


def _nucleus(mass: float) -> Weigh:
    def weigh(places: Places) -> Floats:
        before = (np.where(places.stated[:, None, :] > places.stated[:, :, None], places.stated[:, None, :], 0)).sum(2)
        return np.where(before < mass, places.stated, 0)

    return weigh


def _at_least(share: float) -> Weigh:
    return lambda places: np.where(
        places.stated >= share * places.stated.max(axis=1, keepdims=True, initial=0), places.stated, 0
    )


def _without_last(places: Places) -> Floats:
    least = np.where(places.stated > 0, places.stated, 2).min(axis=1, keepdims=True, initial=2)
    alone = (places.stated > 0).sum(axis=1, keepdims=True) < 2
    return np.where((places.stated > least) | alone, places.stated, 0)


def _ends(nats: float) -> Weigh:
    return lambda places: np.where(places.ends, places.stated * math.exp(nats), places.stated)


def _repeated(nats: float, most: float = math.inf) -> Weigh:
    """Move each token by `nats` for each earlier occurrence, `most` of them at most."""

    def weigh(places: Places) -> Floats:
        return places.stated * np.exp(np.clip(nats * np.minimum(places.seen, most), -MOST_MOVED, MOST_MOVED))

    return weigh


def _even(places: Places) -> Floats:
    return np.where(places.stated > 0, 1.0, 0.0)


ALTERNATIVES: Mapping[str, tuple[Weigh, float]] = {
    **{f"a temperature {t:g} times as high": (_tempered(t), 0.0) for t in (0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0)},
    **{
        f"the likeliest token in {share:.0%} of all places": (_likeliest(1), 1 - share)
        for share in (0.02, 0.1, 0.3, 1 - DOUBT)
    },
    **{f"top_k {k}": (_likeliest(k), DOUBT) for k in (2, 3, 4, 8)},
    **{f"min_p {p:g}": (_at_least(p), DOUBT) for p in (0.3, 0.1, 0.05, 0.02)},
    "all but the least likely token that is left": (_without_last, DOUBT),
    **{f"ends of turn {math.exp(n):.2g} times as likely": (_ends(n), 0.0) for n in (-1.5, -0.7, 1.0, 3.0)},
    **{
        f"tokens of the same answer {math.exp(n):.2g} times as likely": (_repeated(n, 1), 0.0)
        for n in (-2.0, -1.0, -0.3, 0.3, 1.0, 2.0)
    },
    **{
        f"tokens {math.exp(n):.2g} times as likely for each time that the answer holds them": (_repeated(n), DOUBT)
        for n in (-2.0, -0.5, 0.5, 2.0)
    },
    **{f"any listed token in {share:.0%} of all places": (_even, 1 - share) for share in (0.02, 0.1, 0.5)},
}
"""Alternatives among the listed tokens: weights, and the share of the bet that stays on the stated distribution."""
NUCLEI = (0.5, 0.8, 0.9, 0.95, 0.97, 0.99)
"""Alternatives that cut all tokens beyond so much mass, those that are not listed, too."""
LEAST_LOST = 8.0
"""Expected number of tokens that makes their absence remarkable."""
OF_THE_REST = (0.1, 0.5, 2.0, 5.0)
"""Alternatives for all tokens that are not listed together: so many times as likely as stated."""
BLIND = (0.002, 0.01, 0.05)
"""Shares of tokens that are drawn blindly from the vocabulary."""
