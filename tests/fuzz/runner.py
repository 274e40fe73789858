"""Runs cases in a child process. A case that hangs, dies or takes too much memory is a finding, and the run goes on."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
CASE_S = 20.0
"""Seconds that one case may take on a busy machine."""
START_S = 120.0
MAX_FINDINGS = 50
"""A run stops after this many different findings."""


@dataclass
class Report:
    """The result of a run of one target.

    Attributes:
        name: The target.
        seed: The seed of its cases.
        cases: Number of cases.
        refused: Number of cases that the package refused with a documented error.
        accepted: Number of cases that it accepted correctly.
        findings: For each finding, by error and place: the first case's number, the count, and a traceback.
        seconds: Duration of the run.
    """

    name: str
    seed: int
    cases: int = 0
    refused: int = 0
    accepted: int = 0
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, number: int, outcome: dict[str, Any]) -> None:
        """Count one case."""
        self.cases += 1
        if "finding" not in outcome:
            self.refused += outcome["outcome"] == "refused"
            self.accepted += outcome["outcome"] == "accepted"
            return
        key = f"{outcome['finding'].partition(':')[0]} at {outcome['at']}"
        if outcome["finding"].startswith("Finding"):
            key = outcome["finding"]
        finding = self.findings.setdefault(key, {"first": number, "count": 0, **outcome})
        finding["count"] += 1


def run(
    name: str,
    seed: int,
    *,
    cases: int | None = None,
    seconds: float | None = None,
    first: int = 0,
    case_s: float = CASE_S,
) -> Report:
    """Run a target for a number of cases or seconds; each case may take `case_s` seconds."""
    report, began, number = Report(name, seed), time.monotonic(), first
    while len(report.findings) < MAX_FINDINGS:
        with _child(name, seed, number) as lines:
            if lines.next(START_S) != "ready":
                raise RuntimeError(f"The child process of {name} did not start: {lines.errors()}")
            while True:
                report.seconds = time.monotonic() - began
                done = cases is not None and report.cases >= cases
                if done or (seconds is not None and report.seconds >= seconds):
                    return report
                started = lines.next(START_S)
                outcome = lines.next(case_s) if started is not None else None
                if outcome is None:
                    what = "a case did not end in time" if lines.alive else "the process died"
                    report.add(number, {"finding": what, "at": name, "trace": lines.errors()})
                    number += 1
                    break  # start another process
                report.add(number, json.loads(outcome))
                number += 1
                if len(report.findings) >= MAX_FINDINGS:
                    return report
    return report


class _Lines:
    """The output lines of a child process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process, self._fd = process, process.stdout.fileno()
        self._held = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fd, selectors.EVENT_READ)

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    def next(self, limit: float) -> str | None:
        """Return the next line, or None if the child ended or `limit` seconds passed."""
        until = time.monotonic() + limit
        while b"\n" not in self._held:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return None
            if not (read := os.read(self._fd, 1 << 16)):
                self._process.wait(10)
                return None
            self._held += read
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()

    def errors(self) -> str:
        """Kill the child and return the end of its standard error."""
        self._process.kill()
        assert self._process.stderr is not None
        return self._process.stderr.read()[-4_000:].decode(errors="replace")


@contextmanager
def _child(name: str, seed: int, first: int) -> Iterator[_Lines]:
    python_path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-X", "faulthandler", "-m", "fuzz.child", name, str(seed), str(first)]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # much faster than a disk
    with TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as home:
        environment = {**os.environ, "PYTHONPATH": python_path, "TMPDIR": home}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        try:
            yield _Lines(process)
        finally:
            process.kill()
            process.communicate()
