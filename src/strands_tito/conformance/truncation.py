"""What `top_k`, `top_p` and `min_p` leave of the tokens that a server lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASS_SLACK = 0.01
"""How far a truncation by mass may be off: engines sum probabilities in float32, in another order."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Weights:
    """Listed tokens before a truncation.

    Attributes:
        logs: Logarithms of the tokens' weights, shape (n, k), -inf where there are fewer.
        listed: Weight of all listed tokens, shape (n,).
        unlisted: Largest possible weight of all others, shape (n,).
    """

    logs: Floats
    listed: Floats
    unlisted: Floats


def tempered(logprobs: Floats, temperature: float, vocabulary: int) -> Weights:
    """Return the weights of tokens at a temperature, from their logprobs at temperature 1, shape (n, k).

    The weight of N tokens of total probability q is at most N^(1-1/T) q^(1/T) (a power mean), and for T < 1, where no
    token is more likely than the last listed one, p, at most q p^(1/T-1).
    """
    logs = logprobs / temperature
    rest = np.clip(1 - np.exp(logprobs).sum(axis=1), 0.0, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        if temperature >= 1:
            most = vocabulary ** (1 - 1 / temperature) * rest ** (1 / temperature)
        else:
            least = np.where(np.isfinite(logprobs), logprobs, 0).min(axis=1, initial=0.0)
            most = rest * np.exp(least * (1 / temperature - 1))
    return Weights(logs, np.exp(logs).sum(axis=1), np.nan_to_num(most))


def left(sampling: Mapping[str, Any], weights: Weights, near: float, slack: float = MASS_SLACK) -> tuple[Bools, Bools]:
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
