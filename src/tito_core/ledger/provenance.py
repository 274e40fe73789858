"""Where a token came from. The loss mask is derived from this and stored nowhere."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Provenances = npt.NDArray[np.uint8]
"""One `Provenance` value a token, dtype uint8."""


class Provenance(IntEnum):
    """The origin of one token, stored as uint8."""

    PROMPT = 0  # message content: user text, tool results, tool descriptions
    SCAFFOLD = 1  # text that the chat template wrote around the content
    INSERTED = 2  # a closer that the engine never sampled, put in after a truncation
    SAMPLED = 3  # the policy's own token; the only one that is trained by default
    CONSTRAINED = 4  # sampled under a grammar, so the policy did not choose freely


def is_output(provenance: Provenances) -> npt.NDArray[np.bool_]:
    """Return which tokens the engine reported as output (`SAMPLED` or `CONSTRAINED`)."""
    return provenance >= Provenance.SAMPLED


def loss_mask(provenance: Provenances, *, train_constrained: bool = False) -> npt.NDArray[np.uint8]:
    """Derive the loss mask: 1 on `SAMPLED`, on `CONSTRAINED` only when asked for (dtype uint8)."""
    mask = provenance == Provenance.SAMPLED
    if train_constrained:
        mask = mask | (provenance == Provenance.CONSTRAINED)
    return np.asarray(mask, np.uint8)
