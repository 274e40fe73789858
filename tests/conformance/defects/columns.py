"""Defects of optional outputs: top logprobs, prompt logprobs, routed experts and sampling masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.defects.defect import Defect, Edit
from conformance.defects.views import Pairs, View
from tito_conformance.testing import ScriptedRequest


def _top(change: Callable[[list[Pairs], View, ScriptedRequest], list[Pairs]]) -> Edit:
    def edit(view: View, request: ScriptedRequest) -> None:
        if view.top:
            view.top = change(view.top, view, request)

    return edit


def _lowered(rows: list[Pairs], view: View, request: ScriptedRequest) -> list[Pairs]:
    """Lower the logprob of the most likely id that was not sampled."""
    found = []
    for chosen, row in zip(view.ids, rows, strict=True):
        best = max((pair for pair in row if pair[0] != chosen), key=lambda pair: pair[1])
        found.append([(token, value - 9.0) if token == best[0] else (token, value) for token, value in row])
    return found


def _scored(change: Callable[[Pairs], Pairs]) -> Edit:
    def edit(view: View, request: ScriptedRequest) -> None:
        if len(view.scored) > 2:
            view.scored = change(view.scored)

    return edit


def _values_shifted(pairs: Pairs) -> Pairs:
    values = [value for _, value in pairs]
    return [(token, value) for (token, _), value in zip(pairs, values[1:] + values[:1], strict=True)]


def _pairs_shifted(pairs: Pairs) -> Pairs:
    return pairs[1:] + pairs[:1]


def _scaled(pairs: Pairs) -> Pairs:
    return [(token, value * 0.5) for token, value in pairs]


def _experts(change: Callable[[Any], Any]) -> Edit:
    def edit(view: View, request: ScriptedRequest) -> None:
        if view.experts is not None:
            view.experts = change(view.experts)

    return edit


def _mask(change: Callable[[list[int], int], list[int]]) -> Edit:
    def edit(view: View, request: ScriptedRequest) -> None:
        meta = view.answer["meta_info"]
        if "output_token_sampling_mask" in meta:
            rows = zip(meta["output_token_sampling_mask"], view.ids, strict=True)
            meta["output_token_sampling_mask"] = [change(row, chosen) for row, chosen in rows]

    return edit


COLUMNS = (
    Defect("top-of-the-neighbour", 4, "Top logprobs are those of the next token.",
           _top(lambda rows, view, request: rows[1:] + rows[:1])),
    Defect("top-scaled", 4, "Top logprobs are at another temperature.",
           _top(lambda rows, view, request: [[(token, value * 0.5) for token, value in row] for row in rows])),
    Defect("top-too-unlikely", 4, "A likely token has a low top logprob.", _top(_lowered)),
    Defect("prompt-logprobs-shifted", 4, "Prompt logprobs are shifted by one token.", _scored(_values_shifted)),
    Defect("prompt-logprobs-named-wrong", 4, "Prompt logprobs have other token ids.",
           _scored(_pairs_shifted)),
    Defect("prompt-logprobs-short", 2, "The last prompt logprob is missing.", _scored(lambda pairs: pairs[:-1])),
    Defect("prompt-logprobs-scaled", 11, "Prompt logprobs are at another temperature.", _scored(_scaled)),
    Defect("experts-off-by-one", 4, "Routed experts are shifted by one row.",
           _experts(lambda array: np.roll(array, 1, axis=0))),
    Defect("experts-early", 4, "Routed experts are shifted by one row, to the front.",
           _experts(lambda array: np.roll(array, -1, axis=0))),
    Defect("experts-of-the-last-token", 4, "Every token has the last token's experts.",
           _experts(lambda array: np.broadcast_to(array[-1:], array.shape))),
    Defect("mask-without-the-chosen", 4, "A sampling mask lacks the sampled token.",
           _mask(lambda row, chosen: [token for token in row if token != chosen]), wires=("sglang",)),
    Defect("mask-too-wide", 4, "A sampling mask has more than top_k tokens.",
           _mask(lambda row, chosen: [*row, *(token for token in range(64) if token not in row)]), wires=("sglang",)),
)  # fmt: skip
"""Defects of optional outputs."""
