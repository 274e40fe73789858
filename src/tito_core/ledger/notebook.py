"""What a notebook shows of the values here: the viewer makes it, and is found by name, since it lies above."""

from __future__ import annotations

from importlib import import_module

_VIEWER = "strands_tito.viewer.notebook"


def as_html(shown: object) -> str:
    """Return a ledger or a trajectory as HTML."""
    html: str = import_module(_VIEWER).as_html(shown)
    return html
