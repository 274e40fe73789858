"""Budgets of tests that hold their own property or corpus: a sample in `make test`, all of it with TITO_EXAMPLES."""

from __future__ import annotations

import os

PROVE = int(os.environ.get("TITO_EXAMPLES", "0")) > 0
"""Whether budgets are raised (`make prove`)."""


def examples(count: int) -> int:
    """Return the examples of a property inside a test, which `tests/conftest.py` does not raise."""
    return count if PROVE else max(count // 4, 4)
