"""How a notebook shows ledgers and trajectories: `strands_tito` registers its viewer here, the core has none."""

from __future__ import annotations

from collections.abc import Callable

viewers: list[Callable[[object], str]] = []
"""Functions that return a ledger or a trajectory as HTML; the last one is used."""


def as_html(value: object) -> str | None:
    """Return a value as HTML; None, for which a notebook shows its `repr`, where no viewer is registered."""
    return viewers[-1](value) if viewers else None
