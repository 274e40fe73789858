"""The dtype of a server's logits, which no API reports, and the tolerance that follows from it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN = "unknown"
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, UNKNOWN: 0.05}
"""Largest allowed difference between a score and a reported logprob, in nats, by dtype."""
GRIDS = {"bfloat16": 2.0**-6, "float16": 2.0**-10}
"""Smallest step between logits of usual size, 4 to 32, in nats."""
OFF_GRID = 2e-5
"""How far from the grid a difference may be: float32 rounds the logprobs themselves."""
LEAST_ON_GRID = 0.95
LEAST_DIFFERENCES = 20
"""With fewer differences other than 0, the dtype is unknown."""


def dtype_of(top_logprobs: NDArray[Any]) -> str:
    """Return the dtype of a server's logits, which no API reports, as logprobs of the likeliest tokens show it.

    Logits in 16 bits lie on a coarse grid, and so do the differences of two tokens' logprobs at temperature 1.

    Args:
        top_logprobs: At temperature 1, shape (n, k), NaN where there are fewer.
    """
    rows = np.asarray(top_logprobs, np.float64)
    apart = (rows - np.nanmax(rows, axis=1, keepdims=True))[np.isfinite(rows)] if rows.size else np.zeros(0)
    apart = apart[apart < -OFF_GRID]
    if len(apart) < LEAST_DIFFERENCES:
        return UNKNOWN
    for name, step in GRIDS.items():
        off = np.abs(apart / step - np.rint(apart / step)) * step
        if np.mean(off < OFF_GRID) >= LEAST_ON_GRID:
            return name
    return "float32"
