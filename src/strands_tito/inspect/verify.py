"""Asking the engine itself: re-score a trajectory and compare with what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tito_core.backend.checked import connected, score
from tito_core.backend.errors import ContextLengthError
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import create_backend
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.ledger.turn import Draft


@dataclass(frozen=True, slots=True, eq=False)
class Rescored:
    """Recorded logprobs beside the engine's own teacher-forced ones.

    Attributes:
        differences: |recorded - re-scored| in nats, one a compared token, float32.
        not_comparable: Sampled tokens left out, since their logprobs mean something else (law 11), or since other
            weights than those that score sampled them.
        prompt_differences: The same of the `prompt_logprobs` that were recorded, which are raw on every engine.
    """

    differences: Logprobs
    not_comparable: int
    prompt_differences: Logprobs = field(default_factory=lambda: np.zeros(0, np.float32))

    def quantile(self, q: float) -> float:
        """Return a quantile of the differences in nats; NaN when nothing was compared."""
        return float(np.quantile(self.differences, q)) if len(self.differences) else float("nan")


async def connect_for_scoring(backend: str, base_url: str) -> Backend:
    """Connect to a server that is only asked for scores, so that no tokenizer is needed."""
    engine = create_backend(backend, base_url)
    await connected(engine)
    return engine


async def rescore(ledger: Ledger, backend: Backend, *, version: str | None = None) -> Rescored:
    """Re-score every trajectory of a ledger; each token is compared once, where semantics allow.

    Args:
        ledger: The ledger.
        backend: The engine.
        version: The weights that it has now, where they have changed since: only their tokens are compared, and of
            prompts none, since no record says which weights scored them. None compares all.
    """
    differences: list[Logprobs] = []
    of_prompts: list[Logprobs] = []
    not_comparable = 0
    for trajectory in ledger.trajectories():
        scores = await _scores(trajectory, backend, version)
        for segment in trajectory.segments:
            if not segment.is_output or segment.turn in trajectory.context_turns:
                continue
            draft = ledger[segment.turn].draft
            compared = np.zeros(len(draft.output_ids), bool)
            if scores is not None and draft.engine.semantics.comparable_with_scoring():
                compared = _sampled_by(version, draft)
                differences.append(np.abs(scores[segment.start : segment.stop] - draft.logprobs)[compared])
            not_comparable += int(np.count_nonzero(~compared))
            column = draft.extras.get("prompt_logprobs")
            if scores is not None and column is not None and version is None:
                values = column.values.astype(np.float32)
                of_prompts.append(np.abs(scores[column.start : column.start + column.rows] - values))
    return Rescored(_joined(differences), not_comparable, _joined(of_prompts))


async def _scores(trajectory: Trajectory, backend: Backend, version: str | None) -> Logprobs | None:
    """Score a path, unless nothing in it would be compared."""
    own = [turn.draft for turn in trajectory.path if turn.index not in trajectory.context_turns]
    if not any(
        (draft.engine.semantics.comparable_with_scoring() and _sampled_by(version, draft).any())
        or (version is None and "prompt_logprobs" in draft.extras)
        for draft in own
    ):
        return None
    try:
        return await score(backend, trajectory.token_ids)
    except ContextLengthError:  # vLLM scores only what leaves room for one token more
        return None


def _sampled_by(version: str | None, draft: Draft) -> npt.NDArray[np.bool_]:
    """Return which tokens of a turn some weights sampled; None for any."""
    chosen = np.full(len(draft.output_ids), version is None)
    for span in draft.engine.versions if version is not None else ():
        chosen[span.start : span.stop] = span.version == version
    return chosen


def _joined(parts: Sequence[Logprobs]) -> Logprobs:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def merge(parts: Sequence[Rescored]) -> Rescored:
    """Put the comparisons of several ledgers together."""
    return Rescored(
        _joined([part.differences for part in parts]),
        sum(part.not_comparable for part in parts),
        _joined([part.prompt_differences for part in parts]),
    )
