"""Optional outputs from the script's distribution: top logprobs, sampling masks and routed experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from strands_tito.testing.images import token_of
from strands_tito.testing.script import Scorer, ScriptedRequest, float32, mix64

MASKED = -9999.0
"""vLLM's logprob of a token that cannot be sampled."""
MOST_KEPT = 64
"""Likeliest ids that `top_p` and `min_p` choose from; where more would be kept, all are."""
EXPERTS = 8
"""Number of experts in each layer of a scripted mixture-of-experts model."""

Top = Sequence[tuple[int, float]]
"""(id, logprob), most likely first."""


def support(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int) -> list[tuple[int, float]]:
    """Return the ids that `top_k`, `top_p` and `min_p` keep at a position, with logprobs normalised over them.

    An empty list means all ids. The sampled id is always kept, as on a real engine.
    """
    k = 1 if request.temperature == 0 else request.top_k
    if k < 1 and request.top_p >= 1 and not request.min_p:
        return []
    top = scorer.top(ids, position, k if k > 0 else MOST_KEPT, request.temperature or 1.0)
    weights = [math.exp(logprob) for _, logprob in top]
    nucleus, kept, total = 0.0, 0, sum(weights) if k > 0 else 1.0
    while kept < len(top) and nucleus < request.top_p * total and weights[kept] >= request.min_p * weights[0]:
        nucleus += weights[kept]
        kept += 1
    if k < 1 and kept == len(top):
        return []
    left = list(top[:kept])
    if (sampled := token_of(ids[position])) not in dict(left):
        left[-1] = (sampled, left[-1][1])
    whole = sum(math.exp(logprob) for _, logprob in left)
    return [(token, float32(logprob - math.log(whole))) for token, logprob in left]


def reported(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], start: int) -> list[float]:
    """Return logprobs of `ids[start:]` as this engine reports sampled tokens."""
    offsets = request.reported_offsets and request.offsets(ids[start:])
    if not _truncates(request) and not offsets:
        return scorer.score(ids, start, request.reported_temperature)
    plain = scorer.score(ids, start, request.reported_temperature)
    tokens = [token_of(each) for each in ids[start:]]
    return [
        dict(_changed(scorer, request, ids, n, 0, token) or [(token, value)])[token]
        for n, (token, value) in enumerate(zip(tokens, plain, strict=True), start)
    ]


def reported_top(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int, k: int) -> Top:
    """Return the `k` most likely ids with the same logprobs, filled up with masked ids where fewer were kept."""
    left = _changed(scorer, request, ids, position, k)
    if not left:
        return scorer.top(ids, position, k, request.reported_temperature)
    if not _truncates(request):
        return left
    known = {token for token, _ in left}
    others = [token for token in range(k + len(left)) if token not in known]
    return sorted(left, key=lambda pair: -pair[1])[:k] + [(token, MASKED) for token in others[: max(0, k - len(left))]]


def _changed(
    scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int, k: int, *own: int
) -> list[tuple[int, float]]:
    """Return the tokens of a place where penalties, a bias or a truncation change logprobs; else an empty list."""
    if _truncates(request) and (left := support(scorer, request, ids, position)):
        return left
    moved = request.reported_offsets and request.offsets(ids[len(request.prompt_ids) : position])
    return _moved(scorer, request, ids, position, k, *own) if moved else []


def _moved(
    scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int, k: int, *own: int
) -> list[tuple[int, float]]:
    """Return the `k` most likely ids, and `own`, with their logprobs under penalties and a `logit_bias`."""
    temperature = request.reported_temperature
    offsets = {
        token: value / temperature for token, value in request.offsets(ids[len(request.prompt_ids) : position]).items()
    }
    known = dict(scorer.top(ids, position, k + len(offsets), temperature)) if k else {}
    for token in {*offsets, *own} - known.keys():
        [known[token]] = scorer.score([*ids[:position], token], position, temperature)
    mass = {token: math.exp(value) for token, value in known.items()}
    # A simple script's scores may sum to more than 1. The mass without an offset is at least that of the known tokens.
    others = sum(value for token, value in mass.items() if token not in offsets)
    unmoved = max(1 - sum(mass[token] for token in offsets), others)
    whole = unmoved + sum(mass[token] * math.exp(min(value, 700.0)) for token, value in offsets.items())
    whole = max(whole, 1e-300)  # a script's certain token may have a bias that leaves no mass
    moved = [(token, float32(value + offsets.get(token, 0.0) - math.log(whole))) for token, value in known.items()]
    ordered = sorted(moved, key=lambda pair: (-pair[1], pair[0]))
    return [pair for place, pair in enumerate(ordered) if place < k or pair[0] in own]


def _truncates(request: ScriptedRequest) -> bool:
    """Return whether logprobs are normalised over the kept ids. vLLM truncates nothing for a greedy request."""
    cuts = request.top_k > 0 or request.top_p < 1 or request.min_p > 0
    return request.reported_truncated and cuts and request.temperature > 0


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
