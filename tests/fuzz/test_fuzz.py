"""A few hundred cases of each class; `make prove` and tools/fuzz.py run many more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.plain_file import unpacked
from fuzz.runner import run

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fuzz.py"


@pytest.mark.parametrize(("name", "cases"), [("files", 500), ("answers", 200), ("messages", 200)])
def test_nothing_is_found(name: str, cases: int) -> None:
    report = run(name, 1, cases=cases)
    assert report.findings == {}
    assert report.cases == report.refused + report.accepted == cases
    assert min(report.refused, report.accepted) >= cases // 10, "a class whose cases all end alike proves little"


def test_what_hangs_grows_dies_or_breaks_a_promise_is_found_and_the_next_case_is_run() -> None:
    report = run("fuzz.planted:Planted", 12, first=13, cases=16, case_s=2.0)
    assert report.cases == 16
    assert {key.partition(":")[0].partition(" at ")[0] for key in report.findings} == {
        "a case did not end in time",
        "a case took too much memory",
        "MemoryError",
        "the process died",
        "Finding",
    }
    assert report.accepted > 0


def test_a_case_is_the_same_each_time() -> None:
    first, again = (run("fuzz.planted:Planted", 10, cases=8, case_s=3.0) for _ in range(2))
    assert {key: found["first"] for key, found in first.findings.items()} == {
        key: found["first"] for key, found in again.findings.items()
    }


def test_the_tool_prints_a_table_and_json_and_fails_where_something_is_found() -> None:
    command = [sys.executable, str(TOOL), "--class", "files", "--cases", "20", "--seed", "1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    table, line, counted = ended.stdout.splitlines()[1:]
    assert table.split()[:4][0] == "files"
    assert json.loads(line)["cases"] == 20
    assert json.loads(line)["findings"] == {}
    assert counted == "20 cases of files"


def test_the_referee_reads_messagepack() -> None:
    import msgspec

    value = {"a": [None, True, False, 0, -1, 127, 128, -33, 2**31, -(2**40), 2**63, 0.5, "é" * 40, b"x" * 300], "b": {}}
    value |= {"c": list(range(70_000)), "d": {str(n): n for n in range(20)}, "e": "x" * 70_000}
    assert unpacked(msgspec.msgpack.encode(value)) == value
