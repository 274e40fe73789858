"""One test for each check, on one run of the suite against the server that the options name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tito_conformance.checks import CHECKS
from tito_conformance.report import rows

if TYPE_CHECKING:
    from tito_conformance.suite import Outcome


def test_the_run_is_complete(tito_outcome: Outcome) -> None:
    """No error and no interrupt ended the run early."""
    assert tito_outcome.error is None
    assert not tito_outcome.interrupted


@pytest.mark.parametrize("check", CHECKS)
def test_the_law_holds(check: str, tito_outcome: Outcome, tito_required: frozenset[str]) -> None:
    """The check passed wherever it applied."""
    [row] = [each for each in rows(tito_outcome) if each.check == check]
    if row.verdict in ("not applicable", "not reached"):
        why = "; ".join(row.left_out) or "No conversation reached it."
        assert check not in tito_required, f"This required check did not run: {why} Pass --tito-not-require={check}."
        pytest.skip(why)
    assert row.verdict == "holds", str(tito_outcome.broken)
