"""Check that recorded logprobs are the quantity that a trainer computes, before it compares the two (law 11)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from strands_tito.export.sample import TrainingSample
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.turn import Semantics

LogprobPolicy = Literal["checked", "as-recorded", "omit"]
"""What to do with recorded logprobs: "checked" raises unless they are what the trainer computes, "as-recorded" passes
them on unchecked, "omit" leaves them out, so that the trainer computes its own."""


class LogprobMismatchError(ValueError):
    """Recorded logprobs are not the quantity that the trainer compares them with."""


def logprobs_for(
    sample: TrainingSample, *, temperature: float, trainer: str, policy: LogprobPolicy = "checked"
) -> Logprobs | None:
    """Return the logprobs of the trained tokens, and 0.0 on all others, which no loss reads.

    Args:
        sample: The sample.
        temperature: The trainer's logit temperature: it trains on log_softmax(logits / temperature).
        trainer: The trainer's name, for errors.
        policy: See `LogprobPolicy`.

    Returns:
        float32, shape (n,), or None for "omit".

    Raises:
        LogprobMismatchError: With "checked": a trained token's logprob is not log_softmax(logits / temperature) over
            the whole vocabulary, or its semantics are unknown.
        ValueError: `policy` is not a `LogprobPolicy`.
    """
    if policy not in ("checked", "as-recorded", "omit"):
        raise ValueError(f"logprobs must be 'checked', 'as-recorded' or 'omit', not {policy!r}.")
    if policy == "omit":
        return None
    if policy == "checked":
        for semantics in sample.semantics:
            check_semantics(semantics, temperature=temperature, trainer=trainer, rollout=sample.identity.rollout_id)
    trained = sample.loss_mask.astype(np.bool_)
    return np.where(trained, sample.logprobs, np.float32(0)).astype(np.float32)


def check_semantics(semantics: Semantics, *, temperature: float, trainer: str, rollout: str) -> None:
    """Check that logprobs are log_softmax(logits / temperature) over the whole vocabulary.

    Raises:
        LogprobMismatchError: They are not, or their semantics are unknown.
    """
    if semantics.temperature == temperature and not semantics.adjusted:
        return
    kind = {None: "of unknown kind", False: "raw", True: "processed"}[semantics.processed]
    at = "an unknown temperature" if semantics.temperature is None else f"temperature {semantics.temperature}"
    change = ", changed by a grammar, a penalty, top-k or similar" if semantics.adjusted else ""
    raise LogprobMismatchError(
        f"Law 11: {trainer} compares recorded logprobs with log_softmax(logits / {temperature}), but those of rollout "
        f"{rollout} are {kind}, at {at}{change} (source: {semantics.source}). Sample and train at one temperature, on "
        "an engine that reports such logprobs. Or pass logprobs='omit' to let the trainer compute its own, or "
        "logprobs='as-recorded' to use them unchecked."
    )
