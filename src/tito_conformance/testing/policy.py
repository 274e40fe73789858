"""A toy language model: deterministic, normalised, and cheap enough to score 128k tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from tito_conformance.testing.script import Completion, ScriptedRequest, ScriptError, mix64, moves, stamp_of, token_of

_WINDOW = 4  # ids of context that the next token depends on, unless it depends on all
_FAVOURED = 8  # likely ids of a context, one byte of hash each
_CACHED = 100_000  # entries of `top` before the cache starts over
_OUTSIDE = -40.0  # logit of an id outside the alphabet, which is never sampled: all of them together weigh nothing
_SPREAD = 4.0  # nats between the most and the least likely of them
_LOGITS = np.arange(256) / 255 * _SPREAD
_SHIFTS = np.arange(0, 8 * _FAVOURED, 8, dtype=np.uint64)
_MASK = (1 << 64) - 1
_ODD = [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93]
_BASE = 0xC2B2AE3D27D4EB4F  # of the polynomial that hashes a whole context
_INVERSE = pow(_BASE, -1, 1 << 64)


class HashPolicy:
    """A script whose probabilities are a pure function of the last four ids or all, and of all images before them.

    Each context favours eight ids of the alphabet, the eos ids have a fixed logit, and the rest of the alphabet
    shares the weight `tail`. The distribution is a real softmax: temperature, top_k, top_p and min_p work as on an
    engine, greedy sampling is repeatable, and scoring a sequence gives exactly the float32 logprobs that sampling
    reported. Sampling is deterministic: without a seed it depends on the request's number.

    Args:
        vocab_size: Ids are in `[0, vocab_size)`.
        alphabet: Ids that may be sampled besides the eos ids; all by default. Others have a logprob below -40.
        eos_ids: Ids that end an answer; never part of the alphabet.
        eos_weight: Weight of each eos id. Favoured ids have weights of 1 to 55.
        tail: Weight of all other ids of the alphabet together.
        whole: Whether the whole context counts, instead of its last four ids.

    Raises:
        ValueError: The alphabet is too small.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        alphabet: Sequence[int] | None = None,
        eos_ids: Sequence[int] = (),
        eos_weight: float = 4.0,
        tail: float = 2.0,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        chosen = set(range(vocab_size) if alphabet is None else alphabet) - set(eos_ids)
        self._alphabet = np.array(sorted(chosen), dtype=np.int64)
        if len(self._alphabet) <= _FAVOURED:
            raise ValueError(f"The alphabet has {len(self._alphabet)} ids; HashPolicy needs more than {_FAVOURED}.")
        self._eos = tuple(eos_ids)
        self._index = np.full(vocab_size, -1, dtype=np.int64)
        self._index[self._alphabet] = np.arange(len(self._alphabet))
        self._is_eos = np.zeros(vocab_size, dtype=bool)
        self._is_eos[list(self._eos)] = True
        self._others = len(self._alphabet) - _FAVOURED
        self._outside = vocab_size - len(self._alphabet) - len(self._eos)
        self._eos_logit = math.log(eos_weight)
        self._tail_logit = math.log(tail / self._others)
        self._top_cache: dict[tuple[int, int, float], list[tuple[int, float]]] = {}

    def __call__(self, request: ScriptedRequest) -> Completion:
        """Sample until a stop id or `max_new_tokens`."""
        if request.grammar is not None:
            raise ScriptError("HashPolicy does not support a grammar. Answer such requests in your own script.")
        ids = list(request.context[self._begin(len(request.context)) :])
        stamp = stamp_of(ids[-1]) if ids else 0
        stops = request.stop_ids
        seed = mix64(request.number if request.seed is None else ~request.seed & _MASK)
        output: list[int] = []
        while len(output) < request.max_new_tokens:
            muted = request.ignore_eos or len(output) < request.min_new_tokens
            noise, eos = mix64(seed ^ len(output)), () if muted else self._eos
            moved = request.offsets(output)
            if request.repetition != 1:
                moved = moves(self, request, request.whole(output), len(request.prompt_ids) + len(output))
            if len(output) < request.min_new_tokens:
                moved |= dict.fromkeys(stops, -math.inf)
            token = self._sample(self._context(ids), request, noise, eos, moved)
            output.append(token)
            ids.append(token + stamp)
            if token in stops and len(output) > request.min_new_tokens:
                break
        return Completion(output)

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Return float32 logprobs of `ids[start:]` at `temperature` (1.0 is raw), as Python floats."""
        begin = self._begin(start)
        seq = np.asarray(ids[begin:], dtype=np.int64)
        first = start - begin
        hashes = self._contexts(seq, first)
        tokens = token_of(seq[first:])
        levels = ((_mix(hashes)[:, None] >> _SHIFTS) & np.uint64(0xFF)).astype(np.intp)
        size = len(self._alphabet)
        offset = (self._index[tokens] - (hashes % np.uint64(size)).astype(np.int64)) % size
        favoured = (self._index[tokens] >= 0) & (offset < _FAVOURED)
        picked = _LOGITS[np.take_along_axis(levels, np.where(favoured, offset, 0)[:, None], axis=1)[:, 0]]
        tail = np.where(self._index[tokens] >= 0, self._tail_logit, _OUTSIDE)
        chosen = np.where(favoured, picked, np.where(self._is_eos[tokens], self._eos_logit, tail))
        scores: list[float] = (chosen / temperature - self._log_z(levels, temperature)).astype(np.float32).tolist()
        return scores

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """Return the `k` most likely ids, most likely first; ties go to the lower id."""
        key = (self._context(ids[self._begin(position) : position]), k, temperature)
        if key not in self._top_cache:  # a cumulative stream repeats every position in each event
            if len(self._top_cache) >= _CACHED:
                self._top_cache.clear()
            self._top_cache[key] = self._top(*key)
        return list(self._top_cache[key])

    def _top(self, context: int, k: int, temperature: float) -> list[tuple[int, float]]:
        pairs, bits = self._candidates(context, self._eos), mix64(context)
        levels = np.array([[bits >> 8 * j & 0xFF for j in range(_FAVOURED)]])
        size, base = len(self._alphabet), context % len(self._alphabet)
        missing = min(k - len(pairs), size - _FAVOURED)
        pairs += [(int(self._alphabet[(base + _FAVOURED + j) % size]), self._tail_logit) for j in range(missing)]
        log_z = float(self._log_z(levels, temperature)[0])
        scored = [(token, float(np.float32(logit / temperature - log_z))) for token, logit in pairs]
        return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:k]

    def _sample(
        self, context: int, request: ScriptedRequest, noise: int, eos: Sequence[int], offsets: Mapping[int, float]
    ) -> int:
        candidates = dict(self._candidates(context, eos))
        apart = {token for token in offsets if token not in candidates and self._index[token] >= 0}
        candidates |= dict.fromkeys(apart, self._tail_logit)
        forced = {token for token, offset in offsets.items() if offset > 0 and self._index[token] < 0}
        candidates |= {token: _OUTSIDE for token in forced - candidates.keys() if not self._is_eos[token]}
        moved = [(token, logit + offsets.get(token, 0.0)) for token, logit in candidates.items()]
        pairs = sorted(moved, key=lambda pair: (-pair[1], pair[0]))
        if request.temperature == 0:
            return pairs[0][0]
        weights = [math.exp(logit / request.temperature) for _, logit in pairs]
        size, base = len(self._alphabet), context % len(self._alphabet)
        spare = size - _FAVOURED - len(apart)
        tail = spare * math.exp(self._tail_logit / request.temperature)
        keep = len(pairs) if request.top_k <= 0 else min(request.top_k, len(pairs))
        total, nucleus = sum(weights[:keep]), 0.0
        if keep == len(pairs) and request.top_k <= 0:
            total += tail
        kept = 0
        while kept < keep and nucleus < request.top_p * total and weights[kept] >= request.min_p * weights[0]:
            nucleus += weights[kept]
            kept += 1
        if kept == len(pairs) and nucleus < request.top_p * total and not request.min_p:
            nucleus = total
        point = noise / 2**64 * nucleus
        for (token, _), weight in zip(pairs[:kept], weights[:kept], strict=True):
            point -= weight
            if point < 0:
                return token
        if nucleus < total or not spare:
            return pairs[kept - 1][0]
        place = mix64(noise)
        while (token := int(self._alphabet[(base + _FAVOURED + place % (size - _FAVOURED)) % size])) in apart:
            place = mix64(place)
        return token

    def _candidates(self, context: int, eos: Sequence[int]) -> list[tuple[int, float]]:
        """Return the favoured ids with their logits, then the eos ids."""
        size, base, bits = len(self._alphabet), context % len(self._alphabet), mix64(context)
        favoured = [
            (int(self._alphabet[(base + j) % size]), float(_LOGITS[bits >> 8 * j & 0xFF])) for j in range(_FAVOURED)
        ]
        return favoured + [(token, self._eos_logit) for token in eos]

    def _begin(self, position: int) -> int:
        """Return the first id that the distribution at a position depends on."""
        return 0 if self._whole else max(0, position - _WINDOW)

    def _context(self, ids: Sequence[int]) -> int:
        if self._whole:
            values = (np.asarray(ids, dtype=np.int64) + 1).astype(np.uint64)
            return mix64(int(np.sum(values * _powers(_BASE, len(values) + 1)[:0:-1])))
        recent = ids[-_WINDOW:]
        return mix64(sum((t + 1) * m for t, m in zip(reversed(recent), _ODD, strict=False)) & _MASK)

    def _contexts(self, seq: np.ndarray, first: int) -> np.ndarray:
        """Return `_context` of every position from `first`, vectorised. A missing id counts as 0, as in `_context`."""
        values = (seq + 1).astype(np.uint64)
        if self._whole:  # the sum of id * base^distance, modulo 2^64
            powers, inverse = (_powers(base, len(seq) + 1) for base in (_BASE, _INVERSE))
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * inverse[:-1])])
            return _mix((sums * powers)[first : len(seq)])
        padded = np.concatenate([np.zeros(_WINDOW, dtype=np.uint64), values])
        count = len(seq) - first
        total = np.zeros(count, dtype=np.uint64)
        for back, odd in enumerate(_ODD, 1):
            at = _WINDOW + first - back
            total += padded[at : at + count] * np.uint64(odd)
        return _mix(total)

    def _log_z(self, levels: np.ndarray, temperature: float) -> np.ndarray:
        weight = np.exp(_LOGITS / temperature)[levels].sum(axis=1)
        weight += len(self._eos) * math.exp(self._eos_logit / temperature)
        weight += self._others * math.exp(self._tail_logit / temperature)
        weight += self._outside * math.exp(_OUTSIDE / temperature)
        log_z: np.ndarray = np.log(weight)
        return log_z


def _powers(base: int, count: int) -> np.ndarray:
    """Return base^0, base^1, ... modulo 2^64."""
    return _all_powers(base, 1 << count.bit_length())[:count]


@lru_cache
def _all_powers(base: int, count: int) -> np.ndarray:
    powers: np.ndarray = np.cumprod(np.array([1, *[base] * (count - 1)], dtype=np.uint64))
    return powers


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply `mix64` to a uint64 array."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
