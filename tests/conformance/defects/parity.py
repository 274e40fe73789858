"""Defects that a server, or the client, does not show by itself: only beside another server of the same weights."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect, Wrap
from strands_tito.testing import Completion, Script, ScriptedRequest
from tito_core.ledger.interning import CallIds

HOTTER = 1.3
"""What a temperature of 1 is taken for."""


def _of_other_weights(**settings: Any) -> Wrap:
    def of(script: Any) -> Script:
        other: Script = script.with_weights(**settings)
        return other

    return of


class _Hotter:
    """A script whose every logprob is at a higher temperature than it says, scores of prompts included."""

    def __init__(self, script: Any) -> None:
        self._script = script

    def __call__(self, request: ScriptedRequest) -> Completion:
        said: Completion = self._script(request)
        return said if said.logprobs is not None else replace(said, logprobs=self._scored(request, said))

    def _scored(self, request: ScriptedRequest, said: Completion) -> list[float]:
        ids = (*request.prompt_ids, *said.output_ids)
        return self.score(ids, len(request.prompt_ids), request.reported_temperature)

    def score(self, ids: Any, start: int, temperature: float) -> list[float]:
        scores: list[float] = self._script.score(ids, start, temperature * HOTTER)
        return scores

    def top(self, ids: Any, position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        likeliest: list[tuple[int, float]] = self._script.top(ids, position, k, temperature * HOTTER)
        return likeliest


def _hotter(script: Any) -> Script:
    return _Hotter(script)


def _call_ids_by_chance() -> AbstractContextManager[Any]:
    taken = CallIds._take

    def take(self: CallIds) -> int:
        self._given += random.SystemRandom().randrange(1000)
        return taken(self)

    return mock.patch.object(CallIds, "_take", take)


PARITY = (
    Defect("other-weights", 13, "One of two servers has another model's weights.",
           wrap=_of_other_weights(eos_weight=200.0), beside=True),
    Defect("older-weights", 13, "One of two servers has weights of some steps before, with the same likeliest tokens.",
           wrap=_of_other_weights(tail=5.0), beside=True),
    Defect("hotter-logprobs", 13, f"One of two servers reports and scores at {HOTTER} times the temperature it says.",
           wrap=_hotter, beside=True),
    Defect("client-call-ids-by-chance", 13, "Ids of calls are drawn at random.",
           client=_call_ids_by_chance, beside=True),
)  # fmt: skip
"""Defects that show beside another server."""
