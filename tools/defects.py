"""Plant every defect, run the suite on each, and write evidence/defects.md: what catches each, and after how long.

    python tools/defects.py [--seeds 3] [--jobs 8] [--sample 60] [--only NAME ...] [--strangers]

It exits with 1 if a defect escapes or the suite reports a problem of an engine without a defect. With --only, --sample
or --strangers nothing is written. With --strangers it plants another author's, who had not seen what the suite checks:
each on one of its wires with the quick profile, and it prints what caught each. An interrupted run resumes if the code
has not changed. The engines are scripted, so no model is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conformance.defects import all_defects
from conformance.defects.defect import SERVERS, SOUND, SOUND_WITH_IMAGES, Defect
from conformance.defects.stranger_backends import BACKENDS, try_backend
from conformance.defects.stranger_clients import CLIENTS
from conformance.defects.stranger_proxied import PROXIES, try_proxy
from conformance.defects.stranger_servers import SERVERS_DEFECTS
from conformance.defects.trial import Verdict, try_defect, try_sound_pair
from tito_conformance.checks import LAWS, PROFILES
from tito_engines import models

ROOT = Path(__file__).resolve().parents[1]
JOBS = 4 * (os.cpu_count() or 1)
"""Four of five seconds of a run are the scripted engine's latency."""
CODE = ("src", "tests/conformance/defects")
"""Paths that the verdicts depend on."""
PAGE = ROOT / "evidence" / "defects.md"
FOUND = ROOT / "runs" / "defects.jsonl"
"""The verdicts so far, in a folder that git ignores."""
PROFILE = PROFILES["standard"]
RUNS_OF_A_PROCESS = 20
"""Hypothesis keeps every run's conversations, of 30 to 100 MB, as long as the process lives."""


@cache
def tokenizer() -> Any:
    """Load the tokenizer, once for each process."""
    return models.load_tokenizer("smollm2")


Case = tuple[str, str, int]
"""Name of a defect, or of one of `SOUNDS`; a wire; a seed."""
SOUNDS: dict[str, Callable[[str, int], Verdict]] = {
    "alone": lambda wire, seed: try_defect(SOUND, wire, tokenizer(), end(), PROFILE, seed),
    "changing weights": lambda wire, seed: try_defect(
        replace(SOUND, weights=1), wire, tokenizer(), end(), PROFILES["quick"], seed
    ),
    "changing between two folders": lambda wire, seed: try_defect(
        replace(SOUND, weights=2), wire, tokenizer(), end(), PROFILES["quick"], seed
    ),
    "with images": lambda wire, seed: try_defect(SOUND_WITH_IMAGES, wire, tokenizer(), end(), PROFILES["quick"], seed),
    "compared with another": lambda wire, seed: try_sound_pair(wire, tokenizer(), end(), PROFILES["quick"], seed),
}
"""Runs without a defect."""


STRANGERS = {each.name: each for each in (*SERVERS_DEFECTS, *CLIENTS, *BACKENDS, *PROXIES)}
"""Another author's defects, by name; their wires include `toy`, a third-party backend, and proxies."""


def main() -> int:
    """Run all cases; return 1 if a defect escaped or an alarm was false."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs without a defect, of each kind")
    parser.add_argument("--only", nargs="*", default=[], help="names of defects")
    parser.add_argument("--sample", type=int, help="plant this many, drawn anew for each commit")
    parser.add_argument("--strangers", action="store_true", help="plant another author's in place of ours")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes")
    arguments = parser.parse_args()
    console, started, commit = Console(), time.monotonic(), commit_of_code()
    FOUND.parent.mkdir(exist_ok=True)
    known = Known(commit)
    planted = [
        (each.name, wire, 0) for each, wire in all_defects() if not arguments.only or each.name in arguments.only
    ]
    if arguments.strangers:
        names = arguments.only or STRANGERS
        planted = [(name, STRANGERS[name].wires[n % len(STRANGERS[name].wires)], 0) for n, name in enumerate(names)]
    if arguments.sample:
        planted = random.Random(commit).sample(planted, min(arguments.sample, len(planted)))
    partial = bool(arguments.only or arguments.sample or arguments.strangers)
    seeds = range(0 if arguments.only or arguments.strangers else arguments.seeds)
    runs = [(name, wire, seed) for name in SOUNDS for seed in seeds for wire in SERVERS]
    with get_context("spawn").Pool(arguments.jobs, maxtasksperchild=RUNS_OF_A_PROCESS) as pool:
        for what, cases in (("defects", planted), ("sound", runs)):
            new = [case for case in cases if case not in known.verdicts]
            for case, verdict in track(pool.imap_unordered(judged, new), what, len(new), console=console):
                known.add(case, verdict)
    found, sound = ([known.verdicts[case] for case in cases] for cases in (planted, runs))
    escaped = [verdict for verdict in found if verdict.caught_by is None or not verdict.expected]
    hard = {name for name, each in STRANGERS.items() if each.hard} if arguments.strangers else set[str]()
    for verdict in found if arguments.strangers else ():
        mark = " (hard)" if verdict.defect in hard else ""
        console.print(f"{verdict.defect}{mark} on {verdict.wire}: {verdict.caught_by}", markup=False, highlight=False)
    alarms = [verdict for verdict in sound if verdict.caught_by is not None]
    for verdict in (*escaped, *alarms):
        console.print(f"{verdict.defect} on {verdict.wire}: {verdict.caught_by} {verdict.problem}", markup=False)
    console.print(
        f"{len(found) - len(escaped)} of {len(found)} caught; {len(alarms)} alarms in {len(sound)} runs without a "
        f"defect; {time.monotonic() - started:.0f} s",
        highlight=False,
    )
    if not partial:
        PAGE.write_text(page(found, sound, alarms, commit, Counter(name for name, _, _ in runs)), encoding="utf-8")
    return 1 if escaped or alarms else 0


class Known:
    """The verdicts of this version of the code, in a file, so that an interrupted run can resume.

    Args:
        commit: The last commit that changed the code. Verdicts of other commits or of changed files are ignored.
    """

    def __init__(self, commit: str) -> None:
        self.verdicts: dict[Case, Verdict] = {}
        self._commit = commit
        for line in FOUND.read_text(encoding="utf-8").splitlines() if FOUND.exists() else ():
            record = json.loads(line)
            if record["commit"] == commit and " " not in commit:
                self.verdicts[tuple(record["case"])] = Verdict(**record["verdict"])

    def add(self, case: Case, verdict: Verdict) -> None:
        """Store a verdict."""
        self.verdicts[case] = verdict
        record = {"commit": self._commit, "case": case, "verdict": asdict(verdict)}
        with FOUND.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def judged(case: Case) -> tuple[Case, Verdict]:
    """Run one case, in a process of the pool. Cases end in any order, and an interruption loses none that ended."""
    name, wire, seed = case
    if name in SOUNDS:
        return case, SOUNDS[name](wire, seed)
    if name in STRANGERS:
        planted, quick = STRANGERS[name], PROFILES["quick"]
        if wire == "toy":
            return case, try_backend(planted, tokenizer(), end(), quick)
        if wire.startswith("proxy"):
            return case, try_proxy(planted, wire, tokenizer(), end(), quick)
        return case, try_defect(planted, wire, tokenizer(), end(), quick)
    defect = next(each for each, _ in all_defects() if each.name == name)
    return case, try_defect(defect, wire, tokenizer(), end(), PROFILE, seed)


def end() -> int:
    """Return the id that ends a turn."""
    return int(tokenizer().eos_token_id)


def commit_of_code() -> str:
    """Return the last commit that changed the code, with " with changes" if there are uncommitted changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, text=True, capture_output=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *CODE)
    return git("log", "-1", "--format=%h", "--", *CODE) + (" with changes" if changed else "")


def page(
    found: list[Verdict], sound: list[Verdict], alarms: list[Verdict], commit: str, kinds: Mapping[str, int]
) -> str:
    """Return the page."""
    turns = sum(verdict.turns for verdict in sound)
    by_name: dict[str, list[Verdict]] = {}
    for verdict in found:
        by_name.setdefault(verdict.defect, []).append(verdict)
    lines = [
        "# Planted defects",
        "",
        "Does the [conformance suite](../docs/conformance.md) notice an error? Each defect here is the only error of a "
        "[scripted engine](../docs/testing.md) or of the client. The suite runs on it once for each wire (HTTP API of "
        "an engine) that can have the defect, with `--profile standard --seeds`. All are of kinds that we thought of; "
        "[another author's](suite.md) were not all caught.",
        "",
        f"Commit `{commit}`: {len(by_name)} defects in {len(found)} runs, "
        f"{sum(verdict.caught_by is not None for verdict in found)} caught. Without a defect: {len(sound)} runs of "
        f"{turns:,} turns ({', '.join(f'{count} {kind}' for kind, count in kinds.items())}), {len(alarms)} alarms. "
        "`make defects` writes this page, and fails if a defect is missed or an alarm is false.",
        "",
        "*Caught by* is the check that failed first; `src/tito_conformance/checks.py` describes each check. With "
        "`refused` the client itself refused the answer, with `connecting` the whole server, and with `error` the "
        "server failed a valid request. *Turns* were played until then.",
        "",
        "| defect | [law](../docs/laws.md) | what is wrong | caught by | turns |",
        "| --- | --- | --- | --- | --- |",
    ]
    defects = {defect.name: defect for defect, _ in all_defects()}
    lines += [row(defects[name], verdicts) for name, verdicts in by_name.items()]
    return "\n".join(lines) + "\n"


def row(defect: Defect, verdicts: list[Verdict]) -> str:
    """Return one line of the table: what caught the defect, by wire if the wires differ."""
    by: dict[str, list[str]] = {}
    for verdict in verdicts:
        by.setdefault(verdict.caught_by or "**nothing**", []).append(verdict.wire)
    caught_by = ", ".join(name if len(by) == 1 else f"{name} ({', '.join(wires)})" for name, wires in by.items())
    turns = sorted({verdict.turns for verdict in verdicts})
    spread = str(turns[0]) if len(turns) == 1 else f"{turns[0]} to {turns[-1]}"
    return f"| `{defect.name}` | {defect.law} {LAWS[defect.law]} | {defect.what} | {caught_by} | {spread} |"


if __name__ == "__main__":
    sys.exit(main())
