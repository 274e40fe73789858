"""The origin of each token. The loss mask is derived from it and never stored."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Provenances = npt.NDArray[np.uint8]
"""One `Provenance` value per token, dtype uint8."""


class Provenance(IntEnum):
    """The origin of one token, stored as uint8."""

    PROMPT = 0  # message content: user text, tool results, tool descriptions
    SCAFFOLD = 1  # text that the chat template wrote around the content
    INSERTED = 2  # a closing token that the engine did not sample, added after a truncation
    SAMPLED = 3  # sampled by the policy; the only kind trained by default
    CONSTRAINED = 4  # sampled under a grammar, so not a free choice of the policy


def is_output(provenance: Provenances) -> npt.NDArray[np.bool_]:
    """Return which tokens the engine reported as output (`SAMPLED` or `CONSTRAINED`)."""
    return provenance >= Provenance.SAMPLED
