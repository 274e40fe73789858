"""Every planted defect, to show that the suite notices each."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.defects.answers import ANSWERS, STREAMS
from conformance.defects.client import CLIENT
from conformance.defects.columns import COLUMNS
from conformance.defects.defect import Defect
from conformance.defects.parity import PARITY
from conformance.defects.policies import POLICIES
from conformance.defects.sampling import SAMPLING
from conformance.defects.weights import WEIGHTS


def all_defects() -> Iterator[tuple[Defect, str]]:
    """Yield each defect with each wire that it can be planted on."""
    for defect in (*ANSWERS, *STREAMS, *POLICIES, *SAMPLING, *COLUMNS, *WEIGHTS, *PARITY, *CLIENT):
        for wire in defect.wires:
            yield defect, wire
