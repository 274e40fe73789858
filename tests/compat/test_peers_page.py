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
