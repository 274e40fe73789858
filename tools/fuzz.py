"""Feed the package hostile files, engine answers and agent messages, generated from a seed.

    python tools/fuzz.py --class files --minutes 5
    python tools/fuzz.py --class answers --seed 7 --only 1234      # one case again, with its traceback

Each case runs in a child process with limited memory and time. The output ends with a table and a line of JSON for each
class. The exit status is 0 if there are no findings.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fuzz.child import CLASSES
from fuzz.runner import Report, run


def main() -> int:
    """Run the chosen classes; return 0 if there are no findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--class", dest="names", action="append", choices=list(CLASSES), help="default: all")
    parser.add_argument("--minutes", type=float, help="minutes for each class")
    parser.add_argument("--cases", type=int, help="cases of each class; with --minutes, whichever limit comes first")
    parser.add_argument("--seed", type=int, default=20261121, help="seed of the cases")
    parser.add_argument("--only", type=int, help="run one case, by its number")
    chosen = parser.parse_args()
    cases = 1 if chosen.only is not None else chosen.cases
    if cases is None and chosen.minutes is None:
        parser.error("give --minutes or --cases")
    seconds = None if chosen.minutes is None else 60 * chosen.minutes
    reports = [
        run(name, chosen.seed, cases=cases, seconds=seconds, first=chosen.only or 0) for name in chosen.names or CLASSES
    ]
    for report in reports:
        show(report)
    print(f"{'class':10} {'cases':>10} {'refused':>10} {'accepted':>10} {'findings':>10} {'seconds':>8}")
    for report in reports:
        counts = (report.cases, report.refused, report.accepted, len(report.findings))
        print(f"{report.name:10} " + " ".join(f"{count:>10,}" for count in counts) + f" {report.seconds:>8.0f}")
    for report in reports:
        print(json.dumps(line_of(report)))
        print(f"{report.cases} cases of {report.name}")
    return 1 if any(report.findings for report in reports) else 0


def show(report: Report) -> None:
    """Print each finding with the command that reproduces it."""
    for key, found in report.findings.items():
        print(f"{report.name}: {key}, {found['count']} times. {found['finding']}")
        print(f"  python tools/fuzz.py --class {report.name} --seed {report.seed} --only {found['first']}")
        print("    " + found["trace"].replace("\n", "\n    "))


def line_of(report: Report) -> dict[str, object]:
    """Return a run's results for its line of JSON."""
    counts = {"cases": report.cases, "refused": report.refused, "accepted": report.accepted}
    findings = {key: {"first": found["first"], "count": found["count"]} for key, found in report.findings.items()}
    return {
        "class": report.name,
        "seed": report.seed,
        **counts,
        "findings": findings,
        "seconds": round(report.seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
