"""Run the large proofs of evidence/proofs.toml, and write evidence/proofs.{json,md}.

    python tools/prove.py [NAME ...] [--count N] [--seed N]     # all, or these; a whole run is recorded
    python tools/prove.py --smallest                            # in .ci/run: the proofs that no test runs, small
    python tools/prove.py --smallest --record                   # before a release: the same, and recorded
    python tools/prove.py --table                               # write the table again, with the age of its rows
    python tools/prove.py --check                               # before a release: fail on what is older than its code

A proof is one command with a number of cases and a seed. It is printed, so it can be run alone. The large sizes take
hours, and their rows say how old they are; what a release must have on its own commit is each small size, and the pages
with figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "evidence"
RESULTS, PAGE = EVIDENCE / "proofs.json", EVIDENCE / "proofs.md"
PROOFS: dict[str, dict[str, Any]] = tomllib.loads((EVIDENCE / "proofs.toml").read_text(encoding="utf-8"))
PAGES = {
    "docs/benchmarks.md": ["src/tito_core", "src/tito_sglang", "src/tito_vllm", "benchmarks"],
    "docs/compatibility.md": ["src", "tests/export/locks"],
    "evidence/defects.md": ["src/tito_core", "src/tito_conformance"],
}
"""Other pages that name the commit of their figures, and the code that these are of."""
INTRODUCTION = """# Proofs

Each proof checks one property on many random cases. *Holds* means that no case failed. It does not cover cases that the
generator cannot draw, or code that changed afterwards: *changed since* counts the commits after the proof's own that
changed what it tests (*unknown*: the commit was merged away). Rows are of the large size, which takes hours; *small
size* is the last run before a release, in minutes. Proofs without one run among the tests, those of engines and of the
suite included. A wire is an HTTP API of an engine. Servers are [scripted](../docs/testing.md) where no real one is
named. `make prove` runs the proofs of `proofs.toml`, which has the command of each, and writes this page.

| proof | ran | outcome | seed | commit | date | changed since | seconds | small size |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> int:
    """Run the chosen proofs; return 0 if all hold."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("proofs", nargs="*", help=f"of {', '.join(PROOFS)}; default: all")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--count", type=int, help="number of cases; fewer than the proof's own are not recorded")
    parser.add_argument("--smallest", action="store_true", help="the small sizes, of the proofs that have one")
    parser.add_argument("--record", action="store_true", help="record the small sizes too")
    parser.add_argument("--table", action="store_true", help="run nothing; write the table")
    parser.add_argument("--check", action="store_true", help="run nothing; fail if a row is older than its code")
    arguments = parser.parse_args()
    if arguments.check:
        found = stale()
        print(*found, sep="\n", end="\n" * bool(found))
        return 1 if found else 0
    if unknown := set(arguments.proofs) - set(PROOFS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PROOFS)}")
    chosen = arguments.proofs or [name for name in PROOFS if not arguments.smallest or "smallest" in PROOFS[name]]
    holds = True
    for name in () if arguments.table else chosen:
        size = PROOFS[name]["smallest"] if arguments.smallest else arguments.count or PROOFS[name]["count"]
        holds &= run(name, size, arguments.seed, record=arguments.record)
    if arguments.record or not arguments.smallest:
        PAGE.write_text(page(), encoding="utf-8")
    return 0 if holds else 1


def run(name: str, count: int, seed: int, *, record: bool = False) -> bool:
    """Run a proof; it holds if its command succeeds and ran as many cases as it should.

    It is recorded if it has all its cases, or as the proof's small size if `record`.
    """
    proof = PROOFS[name]
    command = proof["command"].format(count=count, seed=seed)
    print(f"{name}: {command}", flush=True)
    words = shlex.split(command)
    variables = dict(words.pop(0).split("=", 1) for _ in range(sum("=" in word for word in words[:4])))
    commit, began = commit_of(proof["paths"]), time.monotonic()
    ended = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env={**os.environ, **variables}, text=True, capture_output=True
    )
    found = re.search(proof["counted"], ended.stdout)
    ran, seconds = int(found[1]) if found else 0, round(time.monotonic() - began)
    holds = ended.returncode == 0 and ran >= count
    print(f"{name}: {ran:,} {proof['unit']}, {'holds' if holds else 'DOES NOT HOLD'}, {seconds} s", flush=True)
    if not holds:
        print(ended.stdout[-6000:], ended.stderr[-2000:], sep="\n", flush=True)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    row = {"ran": ran, "holds": holds, "seconds": seconds, "seed": seed, "commit": commit, "date": date}
    results = json.loads(RESULTS.read_text())
    if count >= proof["count"]:
        results[name] = row
    elif record:
        results.setdefault("small sizes", {})[name] = row
    else:
        return holds
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return holds


def git(*arguments: str) -> str:
    """Return what a git command prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, text=True, capture_output=True).stdout.strip()


def commit_of(paths: list[str]) -> str:
    """Return the last commit that changed the code of a proof, plus " with changes" if some are uncommitted."""
    changed = git("status", "--porcelain", "--", *paths)
    return git("log", "-1", "--format=%h", "--", *paths) + (" with changes" if changed else "")


def changed_since(commit: str, paths: list[str]) -> int | str:
    """Return how many commits changed the code of a proof after a commit, or why that is not known."""
    if " " in commit:
        return "ran with uncommitted changes"
    try:
        return len(git("log", "--format=%h", f"{commit}..HEAD", "--", *paths).splitlines())
    except subprocess.CalledProcessError:
        return "unknown"


def stale() -> list[str]:
    """Return a sentence for each figure of a release that is missing, failed or older than its code."""
    results, wrong = json.loads(RESULTS.read_text()), []
    for name, proof in PROOFS.items():
        if (row := results.get(name)) is not None and not row["holds"]:
            wrong.append(f"make prove PROVE_ARGS={name}: does not hold at {row['commit']}.")
        row = results.get("small sizes", {}).get(name, {"commit": "", "holds": False})
        since = changed_since(row["commit"], proof["paths"]) if row["commit"] else "never ran"
        if "smallest" in proof and (since or not row["holds"]):
            wrong.append(f"make prove PROVE_ARGS='--smallest --record {name}': changed since: {since}.")
    for file, paths in PAGES.items():
        commits = dict.fromkeys(re.findall(r"[Cc]ommit `([^`]+)`", (ROOT / file).read_text(encoding="utf-8")))
        ages = {commit: changed_since(commit, paths) for commit in commits}
        wrong += [
            f"{file}: figures of commit {commit}, changed since: {since}." for commit, since in ages.items() if since
        ]
    return wrong


def page() -> str:
    """Return the table, and what each proof is."""
    results, rows, details = json.loads(RESULTS.read_text()), [], []
    for name, proof in PROOFS.items():
        details += [f"\n## {name}\n", proof["what"], "\n```bash", proof["command"].format(count=proof["count"], seed=1)]
        details += ["```"]
        small = ""
        if last := results.get("small sizes", {}).get(name):
            outcome = "holds" if last["holds"] else "**does not hold**"
            small = f"{last['ran']:,} at `{last['commit']}`, {last['date']}: {outcome}"
        if row := results.get(name):
            outcome = "**does not hold**" if not row["holds"] else "holds"
            if row["ran"] < proof["count"]:
                outcome += f" so far, of {proof['count']:,}"
            since = changed_since(row["commit"], proof["paths"])
            cells = (name, f"{row['ran']:,} {proof['unit']}", outcome, row["seed"], f"`{row['commit']}`", row["date"])
            rows.append(f"| {' | '.join(map(str, cells))} | {since} | {row['seconds']:,} | {small} |")
        else:
            rows.append(f"| {name} | | never recorded | | | | | | {small} |")
    return "\n".join([INTRODUCTION, *rows, *details]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
