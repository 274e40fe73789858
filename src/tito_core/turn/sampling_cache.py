"""What a ledger records of the sampling parameters that a rollout sends turn after turn, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tito_core.backend.protocol import EngineInfo
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import semantics_of
from tito_core.ledger.turn import Sampling, Server

KEPT = 64
"""Parameters that are remembered at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Parameters as a turn holds them, and the server with what its logprobs mean under them."""

    sampling: Sampling
    server: Server


class SamplingCache:
    """Parameters by identity, which are frozen. Threads may share it."""

    def __init__(self) -> None:
        self._stopped: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        self._recorded: dict[int, tuple[SamplingParams, EngineInfo, Recorded]] = {}

    def stopped(self, given: SamplingParams, stops: tuple[int, ...]) -> SamplingParams:
        """Give parameters with the policy's own stops, unless these ignore the end of a turn."""
        if given.ignore_eos:
            return given
        known = self._stopped.get(id(given))
        if known is not None and known[0] is given:
            return known[1]
        complete = given.model_copy(update={"stop_token_ids": tuple(sorted({*given.stop_token_ids, *stops}))})
        _keep(self._stopped, id(given), (given, complete))
        return complete

    def recorded(self, sampling: SamplingParams, backend: str, info: EngineInfo) -> Recorded:
        """Give what a turn with these parameters holds."""
        known = self._recorded.get(id(sampling))
        if known is not None and known[0] is sampling and known[1] is info:
            return known[2]
        parameters = sampling.model_dump(mode="json")
        del parameters["max_new_tokens"]
        made = Recorded(Sampling(parameters), Server(backend, info.model, semantics_of(info, sampling)))
        _keep(self._recorded, id(sampling), (sampling, info, made))
        return made


def _keep(known: dict[int, Any], key: int, value: Any) -> None:
    if len(known) >= KEPT:
        known.clear()
    known[key] = value
