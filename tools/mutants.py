"""Mutate the ledger package with mutmut, run its tests on every mutant, and write docs/mutants.md.

    python tools/mutants.py [--children N] [--report]

mutmut keeps what it found in mutants/ and goes on from there. Each survivor is shown with its change; why it is let
live is looked up in docs/mutants.toml by the line as mutated, so that a survivor without a reason stands out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, REASONS = ROOT / "docs" / "mutants.md", ROOT / "docs" / "mutants.toml"
KILLED = ("killed", "timeout", "suspicious", "segfault", "caught by type check")
"""What mutmut says of a mutant that some test, or the clock, told from the code."""


@dataclass(frozen=True)
class Survivor:
    """A mutant that no test told from the code: its name, the lines it took out and those it put in."""

    name: str
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def key(self) -> str:
        """What its reason is looked up by: file and function, and the lines as mutated."""
        function = self.name.split("__mutmut_")[0]
        return f"{function}: {' '.join(self.added) or 'without ' + ' '.join(self.removed)}"


def run(children: int) -> None:
    """Run what has no result yet."""
    environment = {**os.environ, "TITO_PROFILE": "mutants", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def statuses() -> dict[str, str]:
    """Give mutmut's word on every mutant."""
    found = _mutmut("results", "--all", "true")
    pairs = (line.strip().rsplit(": ", 1) for line in found.splitlines() if "__mutmut_" in line)
    return dict(pairs)


def survivor(name: str) -> Survivor:
    """Read what a mutant changes."""
    lines = [line for line in _mutmut("show", name).splitlines() if not line.startswith(("---", "+++"))]
    changed = {sign: tuple(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"}
    return Survivor(name, changed["-"], changed["+"])


def write(found: dict[str, str], survivors: list[Survivor]) -> None:
    """Write the page."""
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else {}
    counts = Counter(found.values())
    killed = sum(counts[status] for status in KILLED)
    score = killed / len(found)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    row = (len(found), killed, counts["timeout"], counts["survived"], counts["no tests"], f"{score:.1%}")
    lines = [
        "# Mutants of the ledger package",
        "",
        "Written by `make mutants`: a mutant is one small change to the code, killed when a test fails on it.",
        f"mutmut {version('mutmut')}, commit `{commit.strip()}`, {datetime.now(UTC):%Y-%m-%d}.",
        "mutmut leaves properties alone.",
        "",
        "| mutants | killed | of them by the clock | survived | without a test | score |",
        "| --- | --- | --- | --- | --- | --- |",
        f"| {' | '.join(map(str, row))} |",
        "",
        "## Survivors",
        "",
    ]
    for mutant in survivors:
        lines += [f"### `{mutant.name}`", "", "```diff"]
        lines += [f"- {line}" for line in mutant.removed] + [f"+ {line}" for line in mutant.added]
        lines += ["```", "", reasons.get(mutant.key, "No reason was given yet."), ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    unexplained = [mutant.key for mutant in survivors if mutant.key not in reasons]
    print(json.dumps({"mutants": len(found), "killed": killed, "score": score, "unexplained": unexplained}, indent=1))


def _mutmut(*words: str) -> str:
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Run the mutants and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="mutants to run at once")
    parser.add_argument("--report", action="store_true", help="only write the page from what was run")
    arguments = parser.parse_args()
    if not arguments.report:
        run(arguments.children)
    found = statuses()
    write(found, [survivor(name) for name, status in found.items() if status not in KILLED])


if __name__ == "__main__":
    main()
