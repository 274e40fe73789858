"""Logprobs as a trainer may use them: of the quantity that it computes itself, or refused (law 11)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from strands_tito.export.sample import TrainingSample
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.turn import Semantics

LogprobPolicy = Literal["checked", "as-recorded", "omit"]
"""What becomes of recorded logprobs: refused unless they are what the trainer computes, handed on with whatever they
mean, or left out, so that the trainer computes its own."""


class LogprobMismatchError(ValueError):
    """Recorded logprobs are another quantity than the trainer compares them with."""


def logprobs_for(
    sample: TrainingSample, *, temperature: float, trainer: str, policy: LogprobPolicy = "checked"
) -> Logprobs | None:
    """Return the logprobs of the trained tokens, and 0.0 on all others, which no loss reads.

    Args:
        sample: The sample.
        temperature: What the trainer divides its logits by before log_softmax.
        trainer: Its name, for the error.
        policy: See `LogprobPolicy`.

    Returns:
        float32, shape (n,), or None for "omit".

    Raises:
        LogprobMismatchError: With "checked": a trained token's logprob is not log_softmax(logits / temperature) of the
            whole vocabulary, or nobody knows what it is.
        ValueError: `policy` is another word.
    """
    if policy not in ("checked", "as-recorded", "omit"):
        raise ValueError(f"logprobs must be 'checked', 'as-recorded' or 'omit', not {policy!r}.")
    if policy == "omit":
        return None
    if policy == "checked":
        for semantics in sample.semantics:
            require(semantics, temperature=temperature, trainer=trainer, rollout=sample.identity.rollout_id)
    trained = sample.loss_mask.astype(np.bool_)
    return np.where(trained, sample.logprobs, np.float32(0)).astype(np.float32)


def require(semantics: Semantics, *, temperature: float, trainer: str, rollout: str) -> None:
    """Check that logprobs are log_softmax(logits / temperature) of the whole vocabulary.

    Raises:
        LogprobMismatchError: They are not, or nobody knows.
    """
    if semantics.temperature == temperature and not semantics.adjusted:
        return
    kind = {None: "of unknown kind", False: "raw", True: "processed"}[semantics.processed]
    at = "an unknown temperature" if semantics.temperature is None else f"temperature {semantics.temperature}"
    change = ", changed by a grammar, a penalty or a truncation" if semantics.adjusted else ""
    raise LogprobMismatchError(
        f"Law 11: {trainer} compares recorded logprobs with log_softmax(logits / {temperature}), and those of rollout "
        f"{rollout} are {kind}, at {at}{change} (said {semantics.source}). Sample and train at one temperature, with "
        "an engine that returns logprobs so; or let the trainer compute its own by logprobs='omit'; or take them as "
        "they are by logprobs='as-recorded'."
    )
