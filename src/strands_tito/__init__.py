"""strands-tito: a Strands Agents model provider that trains on exactly the tokens that the policy sampled.

This module exports the names that users start with; they are defined in `tito_core`. The subpackages are tools around
rollouts: `collect`, `export`, `integrations`, `inspect` and `viewer`. `compat`, `conformance`,
`engines` and `testing` are former names of packages of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tito_core
from tito_core import display
from tito_core.aliases import alias_modules

if TYPE_CHECKING:
    from tito_core import (
        Adapter,
        HistoryChangedError,
        Ledger,
        MalformedCallError,
        OptionalOutputs,
        ParseReport,
        Policy,
        Provenance,
        SamplingParams,
        Termination,
        TITOModel,
        TotalTokensReachedError,
        Trajectory,
        TurnNotStoredError,
        record_termination,
        recorded_termination,
        termination_of,
    )

    __version__: str
    """Version of the installed distribution."""

alias_modules(
    {
        "strands_tito.compat": "tito_compat",
        "strands_tito.conformance": "tito_conformance",
        "strands_tito.conformance.profiles": "tito_conformance.checks",
        "strands_tito.conformance.wire_reading": "tito_conformance.wire",
        "strands_tito.engines": "tito_engines",
        "strands_tito.testing": "tito_conformance.testing",
    }
)


def _as_html(value: object) -> str:
    from strands_tito.viewer.notebook import as_html

    return as_html(value)  # type: ignore[arg-type]  # a ledger or a trajectory, which this module does not import


display.viewers.append(_as_html)

__all__ = [
    "Adapter",
    "HistoryChangedError",
    "Ledger",
    "MalformedCallError",
    "OptionalOutputs",
    "ParseReport",
    "Policy",
    "Provenance",
    "SamplingParams",
    "TITOModel",
    "Termination",
    "TotalTokensReachedError",
    "Trajectory",
    "TurnNotStoredError",
    "record_termination",
    "recorded_termination",
    "termination_of",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that reading ledgers does not load Strands."""
    if name == "__version__":
        from importlib.metadata import version

        return version("strands-tito")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(tito_core, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
