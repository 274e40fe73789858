"""All planted defects, which the suite must notice."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.defects.adapters import ADAPTERS
from conformance.defects.answers import ANSWERS, STREAMS
from conformance.defects.client import CLIENT
from conformance.defects.columns import COLUMNS
from conformance.defects.defect import Defect
from conformance.defects.images import IMAGES
from conformance.defects.parity import PARITY
from conformance.defects.policies import POLICIES
from conformance.defects.requests import REQUESTS
from conformance.defects.sampling import SAMPLING
from conformance.defects.weights import WEIGHTS


def all_defects() -> Iterator[tuple[Defect, str]]:
    """Yield every pair of a defect and a wire that it can be planted on."""
    for defect in (
        *ANSWERS,
        *STREAMS,
        *POLICIES,
        *SAMPLING,
        *COLUMNS,
        *WEIGHTS,
        *PARITY,
        *CLIENT,
        *IMAGES,
        *REQUESTS,
        *ADAPTERS,
    ):
        for wire in defect.wires:
            yield defect, wire
