"""Mutate a package with mutmut, run its tests on every mutant, and write its row of docs/mutants.md.

    python tools/mutants.py [--package ledger] [--sample N] [--children N] [--report]

Without --package it runs one package after the other. With --sample it runs N mutants of each, drawn at random with
the package's name as the seed; the score is then that of the sample. mutmut works in mutants/PACKAGE, where
everything except pyproject.toml is linked to the repository; it keeps its results there, and a later run continues
from them. tools/mutants_explained.toml has the reasons of accepted survivors, by function and mutated line. The page
counts the survivors; the command prints those without a reason, each with its change, and the reasons without a
survivor.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, EXPLAINED = ROOT / "docs" / "mutants.md", ROOT / "tools" / "mutants_explained.toml"
MUTMUT = "[tool.mutmut]\n"
"""The section of pyproject.toml with mutmut's settings for every package."""
PYTEST = ("-p", "no:cacheprovider", "-q")
HANGS = ("--timeout", "45")
"""Timeout of each test in seconds; it kills mutants that make a test wait forever."""
KILLED = ("killed", "timeout", "suspicious", "segfault", "caught by type check")
"""mutmut's statuses of a mutant on which a test failed or timed out."""
UNKNOWN = "not checked"
"""mutmut's status of a mutant that has not run; the score leaves it out."""
Row = tuple[str, ...]
"""A package's cells of the page's table, without its name."""
HEADINGS = (
    "package",
    "commit",
    "date",
    "mutants",
    "killed",
    "of these by timeout",
    "not run",
    "survivors accepted",
    "other survivors",
    "score",
)
INTRODUCTION = """# Mutants

How well the unit tests notice errors in the code. A mutant is one small change to the code; it is *killed* if a test
fails or times out on it, and *survives* otherwise. The score is the share of killed mutants among those that ran; where
some did not run, those that ran are a random sample.

A survivor is accepted if `tools/mutants_explained.toml` gives a reason, such as a change without effect. The others may
show missing tests: `python tools/mutants.py --package ledger --report` prints them after a run. Not mutated:
properties, lines that hold only a sentence for people, and packages without a row, such as the exporters.

The row of the conformance suite is a random sample, with the tests that need no server; [planted
defects](defects.md) judge the suite as a whole. About 30 of its survivors are in bets that are made once, at import,
where no mutant takes effect.

`make mutants` (`PACKAGE=ledger` for one package, `SAMPLE=500` for a random sample) runs the tests that
`tools/mutants.py` lists for each package, and writes this page.
"""


@dataclass(frozen=True)
class Package:
    """Code to mutate and its tests.

    Attributes:
        name: The package's name on the command line.
        code: Patterns of the files to mutate.
        tests: The tests to run on each mutant that they reach; few and fast ones.
        options: Options for pytest. Tests of time are excluded, because mutmut makes every call slower.
    """

    name: str
    code: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """mutmut's working folder."""
        return ROOT / "mutants" / self.name

    def mutates(self, key: str) -> bool:
        """Return whether a survivor's key names a function of this package."""
        module = re.split(r"\.x(?:ǁ|_)", key)[0].replace(".", "/")
        return any(fnmatch(f"src/{module}.py", pattern) for pattern in self.code)


_WIRE_PARTS = ("backend", "stream", "wire")
"""Modules of each engine's package that belong to the backend."""
_SLOW_OR_FELT = " or ".join(
    (
        "a_hundred_requests",
        "slow_stream",
        "different_logprob_modes",
        "goes_on_over_a_pause",
        "real_sockets",
        "ended_loop",
        "is_dropped",
        "refuses_it_at_connect",
        "several_wrong_fields",
        "far_below_its_limit",
        "does_not_block",
        "test_exit",
        "test_in_process",
    )
)
"""Tests that take seconds or other processes, or feel time or freed memory, which mutmut's own frames change."""
_MODEL_PARTS = ("model", "policy", "settings", "turn/*")
"""The model's modules."""
_UNTRACED = "restored_session or new_root_still or any_kind_of_tool or another_thread_may_add"
"""Tests that work in other processes, or at one function's own code, which mutmut replaces."""
_LONG = " or ".join(
    (
        "latest_paths",
        "mid_stream",
        "many_rollouts",
        "test_concurrency",
        "test_turn_cost",
        "keeps_running",
        "refused_at_once",
        "gives_byte_equal_ledgers",
        "error_in_any_function",
        "while_the_engine_generates",
        "another_process",
        "test_fault_proxy",
        "test_garbage",
        "test_interrupts",
    )
)
"""Tests that take seconds or other processes, or feel time or freed memory."""
_JUDGES = ("oracle", "request_check", "bets", "truncation", "precision")
"""The suite's modules that decide whether something is right."""
_JUDGE_TESTS = ("oracle", "oracle_text", "request_check", "sampler", "near_ties")
"""Their tests without a server."""
PACKAGES = {
    package.name: package
    for package in (
        Package("ledger", ("src/tito_core/ledger/*",), ("tests/ledger", "tests/store")),
        Package(
            "chat",
            ("src/tito_core/chat/*",),
            ("tests/chat",),
            ("-k", "not (of_the_zoo or random_rollouts or attack or plain_content or same_model or packages or real)"),
        ),
        Package(
            "parsing",
            ("src/tito_core/parsing/*",),
            tuple(
                f"tests/parsing/test_{name}.py"
                for name in (
                    "arguments_text",
                    "schema",
                    "damage",
                    "decoding",
                    "detection",
                    "documented",
                    "family_templates",
                    "grammar",
                    "hermes",
                    "loose",
                    "muse_glimmer",
                    "mutated",
                    "peers",
                    "pieces",
                    "preview",
                    "reasoning",
                    "recorded",
                    "typed_value",
                )
            ),
            ("-k", "not time_grows"),
        ),
        Package(
            "backend",
            (
                "src/tito_core/backend/*",
                *(f"src/tito_{engine}/{part}.py" for engine in ("vllm", "sglang") for part in _WIRE_PARTS),
            ),
            ("tests/backend", "tests/vllm", "tests/sglang"),
            (*HANGS, "-k", f"not ({_SLOW_OR_FELT})"),
        ),
        Package(
            "model",
            tuple(f"src/tito_core/{part}.py" for part in _MODEL_PARTS),
            ("tests/model",),
            (*HANGS, "-k", f"not ({_UNTRACED} or {_LONG})"),
        ),
        Package(
            "conformance",
            tuple(f"src/tito_conformance/{part}.py" for part in _JUDGES),
            tuple(f"tests/conformance/test_{part}.py" for part in _JUDGE_TESTS),
            (*HANGS, "-k", "not (planted or left_alone)"),
        ),
    )
}


@dataclass(frozen=True)
class Survivor:
    """A mutant on which every test passed: its name, the lines that it removed and the lines that it added."""

    name: str
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def key(self) -> str:
        """The key of its reason: module and function, and the mutated lines."""
        function = self.name.split("__mutmut_")[0]
        return f"{function}: {' '.join(self.added) or 'without ' + ' '.join(self.removed)}"


def prepare(package: Package) -> None:
    """Link the repository into the package's folder, with a pyproject.toml that sets the package for mutmut."""
    package.folder.mkdir(parents=True, exist_ok=True)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in {line.split("/")[0] for line in tracked.splitlines()} - {"pyproject.toml"}:
        if not (package.folder / name).is_symlink():
            (package.folder / name).symlink_to(ROOT / name)
    shared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    chosen = (
        f"only_mutate = {list(package.code)}\n"
        f"pytest_add_cli_args_test_selection = {list(package.tests)}\n"
        f"pytest_add_cli_args = {[*PYTEST, *package.options]}\n"
    )
    if shared.count(MUTMUT) != 1:
        raise SystemExit(f"pyproject.toml must have the line {MUTMUT.strip()} once.")
    (package.folder / "pyproject.toml").write_text(shared.replace(MUTMUT, MUTMUT + chosen), encoding="utf-8")


def run(package: Package, children: int, sample: int | None) -> None:
    """Run the mutants that have no result yet, or a random sample of all mutants."""
    environment = {**os.environ, "TITO_PROFILE": "mutants", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children)]
    names = []
    if sample is not None:
        # mutmut has no command that only makes the mutants; with a name that none has, it stops after that.
        subprocess.run([*command, "none"], cwd=package.folder, env=environment, capture_output=True, check=False)
        every = sorted(statuses(package))
        names = random.Random(package.name).sample(every, min(sample, len(every)))
    subprocess.run([*command, *names], cwd=package.folder, env=environment, check=True)


def statuses(package: Package) -> dict[str, str]:
    """Return mutmut's status of every mutant, by its name."""
    found = _mutmut(package, "results", "--all", "true")
    pairs = (line.strip().rsplit(": ", 1) for line in found.splitlines() if "__mutmut_" in line)
    return dict(pairs)


def survivor(package: Package, name: str) -> Survivor:
    """Return a mutant's changes."""
    lines = [line for line in _mutmut(package, "show", name).splitlines() if not line.startswith(("---", "+++"))]
    changed = {sign: tuple(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"}
    return Survivor(name, changed["-"], changed["+"])


def explanations() -> dict[str, str]:
    """Return the reasons of accepted survivors by key."""
    return tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))


def row(found: dict[str, str], explained: int, unexplained: int) -> Row:
    """Return a package's row, given each mutant's status and the numbers of survivors with and without a reason."""
    counts = Counter(found.values())
    killed = sum(counts[status] for status in KILLED)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    cells = (
        f"`{commit.strip()}`",
        f"{datetime.now(UTC):%Y-%m-%d}",
        len(found),
        killed,
        counts["timeout"],
        counts[UNKNOWN],
        explained,
        unexplained,
        _score(killed, len(found) - counts[UNKNOWN]),
    )
    return tuple(map(str, cells))


def page(rows: dict[str, Row]) -> str:
    """Return the whole page: one row for each package, in the order of `PACKAGES`, and their sum."""
    lines = [f"| {' | '.join((name, *rows[name]))} |" for name in PACKAGES if name in rows]
    sums = [sum(int(cells[at]) for cells in rows.values()) for at in range(2, 8)]
    total = f"| **all** | | | {' | '.join(map(str, sums))} | {_score(sums[1], sums[0] - sums[3])} |"
    head = [f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    return "\n".join([INTRODUCTION, *head, *lines, total, ""])


def written() -> dict[str, Row]:
    """Return the page's current rows by package."""
    cells = (line.strip("| \n").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    return {found[0]: tuple(found[1:]) for found in cells if found[0] in PACKAGES}


def report(package: Package, found: dict[str, str], survivors: list[Survivor]) -> str:
    """Write the package's row; return a report of survivors without a reason and reasons without a survivor."""
    reasons = explanations()
    open_ = [mutant for mutant in survivors if mutant.key not in reasons]
    rows = {**written(), package.name: row(found, len(survivors) - len(open_), len(open_))}
    PAGE.write_text(page(rows), encoding="utf-8")
    keys = {mutant.key for mutant in survivors}
    needless = [key for key in reasons if package.mutates(key) and key not in keys]
    lines = [f"{package.name}: {len(open_)} survivors without a reason, {len(needless)} reasons without a survivor."]
    for mutant in open_:
        lines += ["", mutant.key, *(f"- {line}" for line in mutant.removed), *(f"+ {line}" for line in mutant.added)]
    return "\n".join([*lines, *(f"\nNo survivor has the reason of {key}" for key in needless)])


def _score(killed: int, ran: int) -> str:
    return f"{killed / ran:.1%}" if ran else "none ran"


def _mutmut(package: Package, *words: str) -> str:
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=package.folder, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Run the mutants and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=PACKAGES, help="the package; default: all")
    parser.add_argument("--sample", type=int, metavar="N", help="run only N mutants of each package; default: all")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="mutants to run at once")
    parser.add_argument("--report", action="store_true", help="only write the row from existing results")
    arguments = parser.parse_args()
    for package in [PACKAGES[arguments.package]] if arguments.package else PACKAGES.values():
        prepare(package)
        if not arguments.report:
            run(package, arguments.children, arguments.sample)
        found = statuses(package)
        alive = [name for name, status in found.items() if status not in (*KILLED, UNKNOWN)]
        print(report(package, found, [survivor(package, name) for name in alive]))


if __name__ == "__main__":
    main()
