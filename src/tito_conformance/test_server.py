"""One test for each check, on one run of the suite against the server that the options name."""

from __future__ import annotations

from typing import Any

import pytest

from tito_conformance.checks import CHECKS


def test_the_run_is_complete(tito_report: dict[str, Any]) -> None:
    """No error and no interrupt ended the run early."""
    assert tito_report["error"] is None
    assert not tito_report["interrupted"]


@pytest.mark.parametrize("check", CHECKS)
def test_the_law_holds(check: str, tito_report: dict[str, Any]) -> None:
    """The check passed wherever it applied."""
    [row] = [each for each in tito_report["checks"] if each["check"] == check]
    if row["verdict"] in ("not applicable", "not reached"):
        why = "; ".join(row["left_out"]) or "No conversation reached it."
        required = check in tito_report["required_not_reached"]
        assert not required, f"This required check did not run: {why} Pass --tito-not-require={check}."
        pytest.skip(why)
    assert row["verdict"] == "holds", tito_report["broken"]
