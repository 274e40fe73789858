"""The dtype of a server's logits, and the tolerance that goes with it.

No API reports the dtype. But logits in 16 bits lie on a coarse grid, and so do the differences of two tokens' logprobs
at temperature 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

AUTO = "auto"
UNKNOWN = "unknown"
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, UNKNOWN: 0.05}
"""Largest allowed difference between a score and a reported logprob, in nats, by dtype."""
TOP = 20
LEAST_TOP = 4
TOKENS = 8
"""Tokens whose likeliest alternatives show the grid."""
GRIDS = {"bfloat16": 2.0**-6, "float16": 2.0**-10}
"""Smallest step between logits of usual size, 4 to 32, in nats."""
OFF_GRID = 2e-5
"""How far from the grid a difference may be: float32 rounds the logprobs themselves."""
LEAST_ON_GRID = 0.95
LEAST_DIFFERENCES = 20
"""With fewer differences other than 0, the dtype is unknown."""


def dtype_of(top_logprobs: NDArray[Any]) -> str:
    """Return the dtype that logprobs of the likeliest tokens show.

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


def center(signed: NDArray[Any]) -> float:
    """Return the mean or the median of differences with their signs, whichever is further from 0."""
    return max(float(np.mean(signed, dtype=np.float64)), float(np.median(signed)), key=abs)
