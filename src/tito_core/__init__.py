"""The core of strands-tito: the tokens that a policy samples are the tokens that it is trained on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tito_core.backend import OptionalOutputs, SamplingParams
    from tito_core.ledger import Adapter, Ledger, Provenance, Trajectory
    from tito_core.model import Policy, TITOModel
    from tito_core.termination import Termination, record_termination, recorded_termination, termination_of
    from tito_core.turn.answer import MalformedCallError, ParseReport
    from tito_core.turn.branch import HistoryChangedError
    from tito_core.turn.recording import TurnNotStoredError
    from tito_core.turn.request import TotalTokensReachedError

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

_MODULES = {
    "Adapter": "tito_core.ledger",
    "HistoryChangedError": "tito_core.turn.branch",
    "Ledger": "tito_core.ledger",
    "MalformedCallError": "tito_core.turn.answer",
    "ParseReport": "tito_core.turn.answer",
    "Policy": "tito_core.model",
    "Provenance": "tito_core.ledger",
    "SamplingParams": "tito_core.backend",
    "TITOModel": "tito_core.model",
    "Termination": "tito_core.termination",
    "TotalTokensReachedError": "tito_core.turn.request",
    "Trajectory": "tito_core.ledger",
    "TurnNotStoredError": "tito_core.turn.recording",
    "OptionalOutputs": "tito_core.backend",
    "record_termination": "tito_core.termination",
    "recorded_termination": "tito_core.termination",
    "termination_of": "tito_core.termination",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that reading ledgers does not import Strands."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
