"""Optional outputs from the script's distribution: top logprobs, sampling masks and routed experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from strands_tito.testing.script import Scorer, ScriptedRequest, float32, mix64

MASKED = -9999.0
"""vLLM's logprob of a token that cannot be sampled."""
EXPERTS = 8
"""Number of experts in each layer of a scripted mixture-of-experts model."""

Top = Sequence[tuple[int, float]]
"""(id, logprob), most likely first."""


def support(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int) -> list[tuple[int, float]]:
    """Return the ids that `top_k`, `top_p` and `min_p` keep at a position, with logprobs normalised over them.

    An empty list means all ids: only a finite `top_k` truncates here. The sampled id is always kept, as on a real
    engine.
    """
    k = 1 if request.temperature == 0 else request.top_k
    if k < 1:
        return []
    top = scorer.top(ids, position, k, request.temperature or 1.0)
    weights = [math.exp(logprob) for _, logprob in top]
    nucleus, kept, total = 0.0, 0, sum(weights)
    while kept < len(top) and nucleus < request.top_p * total and weights[kept] >= request.min_p * weights[0]:
        nucleus += weights[kept]
        kept += 1
    left = list(top[:kept])
    if ids[position] not in dict(left):
        left[-1] = (ids[position], left[-1][1])
    whole = sum(math.exp(logprob) for _, logprob in left)
    return [(token, float32(logprob - math.log(whole))) for token, logprob in left]


def reported(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], start: int) -> list[float]:
    """Return logprobs of `ids[start:]` as this engine reports sampled tokens."""
    if not _truncates(request):
        return scorer.score(ids, start, request.reported_temperature)
    return [dict(support(scorer, request, ids, n))[ids[n]] for n in range(start, len(ids))]


def reported_top(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int, k: int) -> Top:
    """Return the `k` most likely ids with the same logprobs, filled up with masked ids where fewer were kept."""
    left = support(scorer, request, ids, position)
    if not _truncates(request):
        return scorer.top(ids, position, k, request.reported_temperature)
    known = {token for token, _ in left}
    others = [token for token in range(k + len(left)) if token not in known]
    return sorted(left, key=lambda pair: -pair[1])[:k] + [(token, MASKED) for token in others[: max(0, k - len(left))]]


def _truncates(request: ScriptedRequest) -> bool:
    """Return whether logprobs are normalised over the kept ids. vLLM truncates nothing for a greedy request."""
    return request.reported_truncated and request.top_k > 0 and request.temperature > 0


def routed(ids: Sequence[int], layers: int, experts: int) -> npt.NDArray[np.uint8]:
    """Return experts of each token but the last, shape (len(ids) - 1, layers, experts), from a hash of the token."""
    rows = [_experts(token, place, layers, experts) for place, token in enumerate(ids[:-1])]
    return np.array(rows, np.uint8).reshape(-1, layers, experts)


@lru_cache(100_000)
def _experts(token: int, place: int, layers: int, experts: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple((mix64(token << 20 ^ place << 4 ^ layer) + n) % EXPERTS for n in range(experts))
        for layer in range(layers)
    )
