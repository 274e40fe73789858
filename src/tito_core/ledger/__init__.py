"""The ledger: a rollout's tokens and the origin of each. Pure, synchronous, standard library and NumPy only."""

from tito_core.ledger.columns import Column, Columns
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.laws import check_ledger
from tito_core.ledger.ledger import Ledger, Sink
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.trajectory import Segment, Trajectory
from tito_core.ledger.turn import (
    Adapter,
    Annotation,
    Branch,
    CallRecord,
    Draft,
    EngineRecord,
    Finish,
    Header,
    Image,
    MediaSpan,
    Reason,
    ResponseSpan,
    Sampling,
    Semantics,
    Server,
    Turn,
    VersionSpan,
    VocabularyCheck,
)

__all__ = [
    "Adapter",
    "Annotation",
    "Branch",
    "CallRecord",
    "Column",
    "Columns",
    "Draft",
    "EngineRecord",
    "Finish",
    "Header",
    "Image",
    "LawViolationError",
    "Ledger",
    "MediaSpan",
    "Provenance",
    "Reason",
    "ResponseSpan",
    "Sampling",
    "Segment",
    "Semantics",
    "Server",
    "Sink",
    "Trajectory",
    "Turn",
    "VersionSpan",
    "VocabularyCheck",
    "check_ledger",
]
