"""Every planted defect, to show that the suite notices each."""

from __future__ import annotations

from collections.abc import Iterator

from tito_conformance.answer_defects import ANSWERS, STREAMS
from tito_conformance.client_defects import CLIENT
from tito_conformance.column_defects import COLUMNS
from tito_conformance.defect import Defect
from tito_conformance.parity_defects import PARITY
from tito_conformance.policy_defects import POLICIES
from tito_conformance.weight_defects import WEIGHTS


def all_defects() -> Iterator[tuple[Defect, str]]:
    """Yield each defect with each wire that it can be planted on."""
    for defect in (*ANSWERS, *STREAMS, *POLICIES, *COLUMNS, *WEIGHTS, *PARITY, *CLIENT):
        for wire in defect.wires:
            yield defect, wire
