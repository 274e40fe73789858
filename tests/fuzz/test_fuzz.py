"""Some cases of each target; `make prove` and tools/fuzz.py run many more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.plain_file import unpacked
from fuzz.runner import run

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fuzz.py"


@pytest.mark.parametrize(("name", "cases"), [("files", 120), ("answers", 60), ("messages", 80)])
def test_there_are_no_findings(name: str, cases: int) -> None:
    report = run(name, 1, cases=cases)
    assert report.findings == {}
    assert report.cases == report.refused + report.accepted == cases
    assert min(report.refused, report.accepted) >= cases // 10, "cases that all end alike prove little"


def test_planted_faults_are_found_and_the_next_case_is_run_and_each_case_is_reproducible() -> None:
    report = run("fuzz.planted:Planted", 20, first=19, cases=6, case_s=3.0)
    assert report.cases == 6
    assert {key.partition(":")[0].partition(" at ")[0] for key in report.findings} == {
        "a case did not end in time",
        "a case took too much memory",
        "MemoryError",
        "the process died",
        "Finding",
    }
    assert report.accepted == 1
    again = run("fuzz.planted:Planted", 20, first=19, cases=3)
    first = {key: finding["first"] for key, finding in again.findings.items()}
    assert len(first) == 3
    assert first == {key: report.findings[key]["first"] for key in first}


def test_the_tool_prints_a_table_and_json() -> None:
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
