"""How many examples a property runs: few under `make test`, many under `make prove`."""

from __future__ import annotations

import os


def examples(few: int) -> int:
    return max(few, int(os.environ.get("TITO_EXAMPLES", few)))
