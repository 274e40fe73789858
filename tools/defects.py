"""Plant every defect, run the suite on each, and write docs/defects.md: what is caught, by what, after how much.

    python tools/defects.py [--seeds 20] [--only NAME ...]

It exits with 1 when a defect escapes or the suite raises an alarm over engines without any. With --only nothing is
written. The engines are scripted, so it takes no model.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tito_conformance.defect import SERVERS, SOUND, Defect
from tito_conformance.defects import all_defects
from tito_conformance.laws import LAWS
from tito_conformance.profiles import PROFILES
from tito_conformance.trial import Verdict, tried
from tito_core.engine import models

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "defects.md"
PROFILE = PROFILES["standard"]


def main() -> int:
    """Run all; give 1 when something is wrong with the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="runs over engines without a defect, of each wire")
    parser.add_argument("--only", nargs="*", default=[], help="names of defects")
    wanted = parser.parse_args()
    console, tokenizer = Console(), models.load_tokenizer("smollm2")
    end, started, commit = int(tokenizer.eos_token_id), time.monotonic(), commit_of_src()
    chosen = [(defect, wire) for defect, wire in all_defects() if not wanted.only or defect.name in wanted.only]
    found = [tried(defect, wire, tokenizer, end, PROFILE) for defect, wire in track(chosen, "defects", console=console)]
    runs = [(wire, seed) for seed in range(0 if wanted.only else wanted.seeds) for wire in SERVERS]
    sound = [tried(SOUND, wire, tokenizer, end, PROFILE, seed) for wire, seed in track(runs, "sound", console=console)]
    escaped = [verdict for verdict in found if verdict.caught_by is None or not verdict.expected]
    alarms = [verdict for verdict in sound if verdict.caught_by is not None]
    for verdict in (*escaped, *alarms):
        console.print(f"{verdict.defect.name} on {verdict.wire}: {verdict.caught_by} {verdict.problem}", markup=False)
    console.print(
        f"{len(found) - len(escaped)} of {len(found)} caught; {len(alarms)} alarms in {len(sound)} runs without a "
        f"defect; {time.monotonic() - started:.0f} s",
        highlight=False,
    )
    if not wanted.only:
        PAGE.write_text(page(found, sound, alarms, commit), encoding="utf-8")
    return 1 if escaped or alarms else 0


def commit_of_src() -> str:
    """Give the last commit that changed the code, and say so when it has changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, text=True, capture_output=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "src")
    return git("log", "-1", "--format=%h", "--", "src") + (" with changes" if changed else "")


def page(found: list[Verdict], sound: list[Verdict], alarms: list[Verdict], commit: str) -> str:
    """Write the page."""
    turns = statistics.median(verdict.turns for verdict in sound) if sound else 0
    by_name: dict[str, list[Verdict]] = {}
    for verdict in found:
        by_name.setdefault(verdict.defect.name, []).append(verdict)
    lines = [
        "# Planted defects",
        "",
        "Written by `make defects`, which fails when a defect escapes or an alarm is false. Each defect is the only "
        "thing wrong with a scripted engine, or with the client; the suite runs its standard profile.",
        "",
        f"Commit `{commit}`: {len(by_name)} defects, {len(found)} times with their wires, "
        f"{sum(verdict.caught_by is not None for verdict in found)} caught. Without a defect: {len(sound)} runs of "
        f"{turns:.0f} turns in the middle, {len(alarms)} alarms.",
        "",
        "| defect | law | what is wrong | caught by | turns until then |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [row(verdicts[0].defect, verdicts) for verdicts in by_name.values()]
    return "\n".join(lines) + "\n"


def row(defect: Defect, verdicts: list[Verdict]) -> str:
    """Write one line: what noticed it, by wire where that differs."""
    by: dict[str, list[str]] = {}
    for verdict in verdicts:
        by.setdefault(verdict.caught_by or "**nothing**", []).append(verdict.wire)
    said = ", ".join(name if len(by) == 1 else f"{name} ({', '.join(wires)})" for name, wires in by.items())
    turns = sorted({verdict.turns for verdict in verdicts})
    spread = str(turns[0]) if len(turns) == 1 else f"{turns[0]} to {turns[-1]}"
    return f"| `{defect.name}` | {defect.law} {LAWS[defect.law]} | {defect.what} | {said} | {spread} |"


if __name__ == "__main__":
    sys.exit(main())
