"""Routed experts as trainers replay them: of every token, or none at all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tito_core.export.sample import NO_EXPERT, TrainingSample


def experts_of(sample: TrainingSample) -> npt.NDArray[np.generic] | None:
    """Give the experts of every token but the last, which no logit of a loss needs.

    Returns:
        Integers, shape (n - 1, layers, experts), or None where the engine gave none.

    Raises:
        ValueError: Some tokens have none: a replay would send them through experts of its own choice.
    """
    if sample.routed_experts is None:
        return None
    rows = sample.routed_experts[:-1]
    missing = np.flatnonzero((rows == NO_EXPERT).any(axis=(1, 2)))
    if len(missing):
        raise ValueError(
            f"The engine gave no experts for {len(missing)} of {len(sample) - 1} tokens, the first at {missing[0]}, in "
            f"rollout {sample.identity.rollout_id}: ask for them in every turn with wanted={{'routed_experts': True}}."
        )
    return rows
