"""Mutate a package with mutmut, run its tests on every mutant, and print the score and the survivors.

    python tools/mutants.py [--package ledger] [--sample N] [--children N]

Without --package it runs one package after the other. With --sample it runs N mutants of each, drawn at random with
the package's name as the seed; the score is then that of the sample. mutmut works in mutants/PACKAGE, where
everything except pyproject.toml is linked to the repository; it keeps its results there, and a later run continues
from them. evidence/mutants.md keeps the scores of earlier runs.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTMUT = "[tool.mutmut]\n"
"""The section of pyproject.toml with mutmut's settings for every package."""
PYTEST = ("-p", "no:cacheprovider", "-q")
HANGS = ("--timeout", "45")
"""Timeout of each test in seconds; it kills mutants that make a test wait forever."""
KILLED = ("killed", "timeout", "suspicious", "segfault", "caught by type check")
"""mutmut's statuses of a mutant on which a test failed or timed out."""
UNKNOWN = "not checked"
"""mutmut's status of a mutant that has not run; the score leaves it out."""


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


_WIRE_PARTS = ("backend", "wire")
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
_JUDGES = ("oracle", "rendering", "bets", "sampler")
"""The suite's modules that decide whether something is right."""
_JUDGE_TESTS = ("oracle", "sampler", "fixed")
"""Their tests without a server."""
PACKAGES = {
    package.name: package
    for package in (
        Package("ledger", ("src/tito_core/ledger/*",), ("tests/ledger", "tests/store")),
        Package(
            "chat",
            ("src/tito_core/chat/*",),
            (
                "tests/chat",
                *(f"tests/model/test_{name}.py" for name in ("invalid_messages", "going_on", "certificate")),
            ),
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
            (*HANGS, "-m", "suite", "-k", "not (planted or left_alone)"),
        ),
    )
}


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


def _mutmut(package: Package, *words: str) -> str:
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=package.folder, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Run the mutants and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=PACKAGES, help="the package; default: all")
    parser.add_argument("--sample", type=int, metavar="N", help="run only N mutants of each package; default: all")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="mutants to run at once")
    arguments = parser.parse_args()
    for package in [PACKAGES[arguments.package]] if arguments.package else PACKAGES.values():
        prepare(package)
        run(package, arguments.children, arguments.sample)
        found = statuses(package)
        ran = [name for name, status in found.items() if status != UNKNOWN]
        alive = [name for name in ran if found[name] not in KILLED]
        for name in alive:
            print(_mutmut(package, "show", name))
        print(f"{package.name}: {len(ran) - len(alive)} of {len(ran)} killed, of {len(found)} mutants")


if __name__ == "__main__":
    main()
