"""The ledger: a rollout's tokens and the origin of each. Pure, synchronous, standard library and NumPy only."""

from tito_core.ledger.branch import Branch, Reason
from tito_core.ledger.columns import Column, Columns
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.forest_invariants import check_ledger
from tito_core.ledger.header import Annotation, Header
from tito_core.ledger.image import Image
from tito_core.ledger.ledger import Ledger, Sink
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.trajectory import Segment, Trajectory
from tito_core.ledger.turn import (
    CallRecord,
    Draft,
    EngineRecord,
    Finish,
    MediaSpan,
    ResponseSpan,
    Sampling,
    Semantics,
    Server,
    Turn,
    VersionSpan,
)
from tito_core.ledger.vocabulary import VocabularyCheck

__all__ = [
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
