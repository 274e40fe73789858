"""Asking the engine itself: re-score a trajectory and compare with what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_core.backend.errors import ContextLengthError
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import create_backend
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True, eq=False)
class Rescored:
    """Recorded logprobs beside the engine's own teacher-forced ones.

    Attributes:
        differences: |recorded - re-scored| in nats, one a compared token, float32.
        not_comparable: Sampled tokens left out, since their logprobs mean something else (law 11).
    """

    differences: Logprobs
    not_comparable: int

    def quantile(self, q: float) -> float:
        """Give a quantile of the differences in nats; NaN when nothing was compared."""
        return float(np.quantile(self.differences, q)) if len(self.differences) else float("nan")


async def connect_for_scoring(backend: str, base_url: str) -> Backend:
    """Connect to a server that is only asked for scores, so that no tokenizer is needed."""
    engine = create_backend(backend, base_url)
    await engine.connect()
    return engine


async def rescore(ledger: Ledger, backend: Backend) -> Rescored:
    """Re-score every trajectory of a ledger; each sampled token is compared once, where semantics allow."""
    differences: list[Logprobs] = []
    not_comparable = 0
    for trajectory in ledger.trajectories():
        try:
            scores = await backend.score(trajectory.token_ids.tolist())
        except ContextLengthError:  # vLLM scores only what leaves room for one token more
            scores = None
        for segment in trajectory.segments:
            if not segment.is_output or segment.turn in trajectory.context_turns:
                continue
            draft = ledger[segment.turn].draft
            if scores is not None and draft.engine.semantics.comparable_with_scoring():
                differences.append(np.abs(scores[segment.start : segment.stop] - draft.logprobs))
            else:
                not_comparable += len(draft.output_ids)
    return Rescored(np.concatenate(differences) if differences else np.zeros(0, np.float32), not_comparable)


def merge(parts: Sequence[Rescored]) -> Rescored:
    """Put the comparisons of several ledgers together."""
    columns = [part.differences for part in parts]
    joined = np.concatenate(columns) if columns else np.zeros(0, np.float32)
    return Rescored(joined, sum(part.not_comparable for part in parts))
