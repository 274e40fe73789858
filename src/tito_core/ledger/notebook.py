"""HTML for notebooks. The viewer renders it and is imported by name, because this package may not import it."""

from __future__ import annotations

from importlib import import_module

_VIEWER = "strands_tito.viewer.notebook"


def as_html(value: object) -> str:
    """Return a ledger or a trajectory as HTML."""
    html: str = import_module(_VIEWER).as_html(value)
    return html
