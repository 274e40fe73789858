"""The page about the peers' own tests: each failing test has a reason."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("peers_tests", ROOT / "tools" / "peers_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers_tests"] = module
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def test_every_test_that_does_not_pass_has_a_reason_and_every_reason_a_test() -> None:
    page = (ROOT / "evidence" / "peers_tests.md").read_text(encoding="utf-8")
    reasons = tomllib.loads((ROOT / "evidence" / "peers_tests.toml").read_text(encoding="utf-8"))["reasons"]
    made = tool()
    assert made.NO_REASON not in page
    failing = re.sub(r"^\| `[^|]*` \| \d+ \| .*$", "", page, flags=re.MULTILINE)  # without the private names
    named = re.findall(r"`((?:core\.)?test_[^`]+)`", failing)
    listed = [name for name in named if "::" in name and ".py" not in name]
    assert listed
    used = {made.reason_of(name, reasons) for name in listed}
    assert used == set(reasons.values())
    rows = re.findall(r"^\| (strands-\w+ [\d.]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert [title for title, *_ in rows] == [suite.title for suite in made.SUITES]
    assert sum(int(bad) for *_, bad, _alone in rows) == len(listed)
    assert all(int(total) == int(passed) + int(bad) for _, total, passed, bad, _ in rows)


def test_a_test_without_a_reason_is_marked() -> None:
    made = tool()
    suite = made.SUITES[0]
    outcomes = [made.Outcome("test_a.TestB::test_c", "AssertionError"), made.Outcome("test_a::test_d", None)]
    page = made.page({suite: outcomes}, {"test_z*": "Because."})
    assert f"| {suite.title} | 2 | 1 | 1 | 1 |" in page
    assert f"| `test_a.TestB::test_c` | {made.NO_REASON} |" in page
    assert "All pass." in made.page({suite: outcomes[1:]}, {})


def test_tests_that_pass_with_the_adapters_alone_are_listed_by_private_name() -> None:
    made = tool()
    suite = made.SUITES[0]
    error = "AttributeError: type object 'SGLangClient' has no attribute '_session'"
    other = "AttributeError: 'LoopLimiter' object has no attribute '_on'. Did you mean: 'on'?"
    passing = [made.Outcome("test_a::test_c", None), made.Outcome("test_a::test_d", None)]
    alone = [made.Outcome("test_a::test_c", error), made.Outcome("test_a::test_d", other)]
    page = made.page({suite: passing}, {}, {suite: alone})
    assert f"| {suite.title} | 2 | 2 | 0 | 0 |" in page
    assert "| `SGLangClient._session` | 1 | `test_a::test_c` |" in page
    assert "| `LoopLimiter._on` | 1 | `test_a::test_d` |" in page


def test_a_skipped_test_counts_as_failing(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.unit.test_a.TestB" name="test_c"/>'
        '<testcase classname="tests.unit.test_a" name="test_d"><failure message="boom&#10;more"/></testcase>'
        '<testcase classname="tests.unit.test_a" name="test_e"><skipped message="later"/></testcase>'
        "</testsuite></testsuites>"
    )
    made = tool()
    found = [(outcome.name, outcome.raised) for outcome in made.outcomes(report)]
    assert found == [("test_a.TestB::test_c", None), ("test_a::test_d", "boom"), ("test_a::test_e", "later")]
