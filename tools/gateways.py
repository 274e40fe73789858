"""Judge the gateways whose adapters ship, each in an environment of its own, and write the reports of docs/gateways.md.

    python tools/gateways.py --python python3.12 --environments DIR [NAME ...]
    python tools/pages.py

An environment that is in DIR already is used as it is; remove it to judge a newer release. Some take gigabytes.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from tito_conformance.gateway.adapter import ADAPTERS
from tito_conformance.gateway.child import facts_in

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "evidence/gateways"


def main() -> int:
    """Judge every gateway, in every mode and on every wire; return 1 if one could not be started."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="adapters; default: all")
    parser.add_argument("--python", default=sys.executable, help="interpreter of new environments")
    parser.add_argument("--environments", type=Path, required=True, help="folder of the environments")
    arguments = parser.parse_args()
    failed = 0
    for path in sorted(ADAPTERS.glob("[a-z]*.py")):
        if not arguments.names or path.stem.replace("_", "-") in arguments.names:
            failed += judge(path, arguments.python, arguments.environments)
    return int(failed > 0)


def judge(adapter: Path, python: str, environments: Path) -> int:
    """Judge one gateway, and return how often it could not be started."""
    facts, name = facts_in(str(adapter)), adapter.stem.replace("_", "-")
    interpreter = environments / name / "bin/python" if facts["pip"] else Path(sys.executable)
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", environments / name], check=True)
        for given in facts["pip"]:
            subprocess.run([interpreter, "-m", "pip", "install", "-q", *shlex.split(given)], check=True)
    statuses = []
    for variant in facts.get("variants") or [""]:
        for wire in facts["wires"]:
            named = f"{name}:{variant}" if variant else name
            options = ["--gateway", named, "--wire", wire, "--python", interpreter, "--report", REPORTS]
            statuses.append(subprocess.run([sys.executable, "-m", "strands_tito", "conformance", *options]).returncode)
    return sum(status not in (0, 1) for status in statuses)


if __name__ == "__main__":
    sys.exit(main())
