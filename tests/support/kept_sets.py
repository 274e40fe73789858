"""Rollouts sampled under a truncation from distributions that are known, with what an engine would record of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from support.drafts import engine_record, make_draft
from tito_core.ledger import Column, Ledger, Sampling, Semantics, Server

VOCABULARY = 12


@dataclass(frozen=True)
class Sampled:
    """A rollout of one turn a row of `p`, and for each sampled token its kept set, found the slow way."""

    ledger: Ledger
    kept: list[list[int]]
    whole: list[float]
    over_kept: list[float]


def kept_of(p: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the kept ids of one distribution: min-p, then top-k, then top-p over what is left."""
    order = sorted(range(len(p)), key=lambda token: -p[token])
    order = [token for token in order if p[token] >= min_p * p[order[0]]]
    order = order[:top_k] if top_k > 0 else order
    total, found = sum(p[token] for token in order), list[int]()
    for token in order:
        found.append(token)
        if sum(p[each] for each in found) >= top_p * total:
            break
    return found


def truncated(seed: int, turns: int, *, top: int, mask: bool, over: bool = False, **sampling: Any) -> Ledger:
    return sampled(seed, turns, top=top, mask=mask, over=over, **sampling).ledger


def sampled(seed: int, turns: int, *, top: int, mask: bool, over: bool = False, **sampling: Any) -> Sampled:
    """Sample a chain of turns.

    Args:
        seed: Of the distributions and the sampler.
        turns: Number of turns, each of one to four tokens.
        top: Number of top logprobs that are recorded.
        mask: Whether kept sets are recorded.
        over: Whether the engine's logprobs are normalised over the kept set.
        **sampling: `top_k`, `top_p`, `min_p`; others are recorded only.
    """
    rng, ledger = np.random.default_rng(seed), Ledger()
    given = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, **sampling}
    found = Sampled(ledger, [], [], [])
    for turn in range(turns):
        ids, values, sets, tops = [], [], [], []
        for _ in range(int(rng.integers(1, 5))):
            p = rng.dirichlet(np.full(VOCABULARY, 0.6)).tolist()
            kept = kept_of(p, given["top_k"], given["top_p"], given["min_p"])
            total = sum(p[token] for token in kept)
            token = int(rng.choice(kept, p=[p[each] / total for each in kept]))
            found.kept.append(kept)
            found.whole.append(math.log(p[token]))
            found.over_kept.append(math.log(p[token] / total))
            shown = [(p[each] / total if each in kept else 0.0) if over else p[each] for each in range(VOCABULARY)]
            likeliest = sorted(range(VOCABULARY), key=lambda each: -shown[each])[:top]
            tops.append([(each, math.log(shown[each]) if shown[each] else math.nan) for each in likeliest])
            ids.append(token)
            values.append(found.over_kept[-1] if over else found.whole[-1])
            sets.append(kept)
        extras, before = {}, ledger.path_length(turn - 1 if turn else None)
        if mask:
            rows = [[*row, *[-1] * (VOCABULARY - len(row))] for row in sets]
            extras["sampling_mask"] = Column.of(before + 2, np.array(rows))
        if top:
            listed = [[each if not math.isnan(value) else -1 for each, value in row] for row in tops]
            extras["top_ids"] = Column.of(before + 2, np.array(listed))
            extras["top_logprobs"] = Column.of(before + 2, np.array([[value for _, value in row] for row in tops]))
        engine = replace(engine_record(len(ids)), server=Server("scripted", "m", Semantics(True, 1.0, over, "test")))
        draft = make_draft(turn - 1 if turn else None, before, [100, 101], ids, logprobs=np.array(values, np.float32))
        parameters = Sampling({"temperature": 1.0, "repetition_penalty": 1.0, **given})
        ledger.commit(replace(draft, sampling=parameters, engine=engine, extras=extras))
    ledger.annotate("reward", 1.0)
    return found
