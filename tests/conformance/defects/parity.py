"""Defects that are visible only in a comparison with another server of the same weights."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect, Wrap
from tito_conformance.testing import Completion, Script, ScriptedRequest
from tito_conformance.testing.script import reported
from tito_core.ledger.ledger import CallIds

HOTTER = 1.3
"""The temperature that is applied for a temperature of 1."""


def _of_other_weights(**settings: Any) -> Wrap:
    def of(script: Any) -> Script:
        other: Script = script.with_weights(**settings)
        return other

    return of


class _Hotter:
    """A script whose logprobs and scores are at a higher temperature than requested."""

    def __init__(self, script: Any) -> None:
        self._script = script

    def __call__(self, request: ScriptedRequest) -> Completion:
        completion: Completion = self._script(request)
        if completion.logprobs is not None:
            return completion
        return replace(completion, logprobs=self._logprobs(request, completion))

    def _logprobs(self, request: ScriptedRequest, completion: Completion) -> list[float]:
        ids = (*request.prompt_ids, *completion.output_ids)
        return reported(self, request, ids, len(request.prompt_ids))

    def score(self, ids: Any, start: int, temperature: float) -> list[float]:
        scores: list[float] = self._script.score(ids, start, temperature * HOTTER)
        return scores

    def top(self, ids: Any, position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        likeliest: list[tuple[int, float]] = self._script.top(ids, position, k, temperature * HOTTER)
        return likeliest


def _hotter(script: Any) -> Script:
    return _Hotter(script)


def _random_call_ids() -> AbstractContextManager[Any]:
    taken = CallIds._take

    def take(self: CallIds) -> int:
        self._given += random.SystemRandom().randrange(1000)
        return taken(self)

    return mock.patch.object(CallIds, "_take", take)


PARITY = (
    Defect("other-weights", 13, "One of two servers has other weights.",
           wrap=_of_other_weights(eos_weight=200.0), needs_second_server=True),
    Defect("older-weights", 13, "One of two servers has older weights with the same greedy tokens.",
           wrap=_of_other_weights(tail=5.0), needs_second_server=True),
    Defect("hotter-logprobs", 13, f"One of two servers reports and scores at {HOTTER} times the temperature.",
           wrap=_hotter, needs_second_server=True),
    Defect("client-call-ids-by-chance", 13, "Ids of calls are random.",
           client=_random_call_ids, needs_second_server=True),
)  # fmt: skip
"""Defects that need a second server."""
