"""The ledger: what a rollout's tokens are and where each came from. Pure, synchronous, numpy only."""

from tito_core.ledger.invariants import LawViolationError, check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.trajectory import Segment, Trajectory
from tito_core.ledger.turn import CallRecord, Draft, EngineRecord, Finish, Semantics, Turn, VersionSpan

__all__ = [
    "CallRecord",
    "Draft",
    "EngineRecord",
    "Finish",
    "LawViolationError",
    "Ledger",
    "Provenance",
    "Segment",
    "Semantics",
    "Trajectory",
    "Turn",
    "VersionSpan",
    "check_ledger",
]
