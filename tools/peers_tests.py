"""Run unit tests of strands-sglang, strands-vllm and strands-env against our names; write evidence/peers_tests.md.

    python tools/peers_tests.py [--python PATH]

pip fetches each source distribution with its pinned sha256 into the user's cache, and its tests are copied to a
temporary folder; the repository keeps nothing of them. They run in their own environment, on Python 3.12, with
tools/peers_shim.py, which replaces the peers' packages by ours. evidence/peers_tests.toml has the reason why a test
does not pass, by its name; the page marks failures without a reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

from bench import interpreter  # noqa: E402

from tito_engines.spec import cache_dir  # noqa: E402

PAGE, REASONS = ROOT / "evidence" / "peers_tests.md", ROOT / "evidence" / "peers_tests.toml"
NEEDED = ("pybase64", "openai", "boto3", "cachetools", "aiolimiter", "click", "tqdm", "python-dotenv", "pytest-timeout")
"""Packages that the tests import, besides pytest and ours."""
SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")
ABOUT = """\
The unit tests of strands-sglang and strands-vllm, and those of strands-env that use a model, run with `tito_sglang` and
`tito_vllm` under the names `strands_sglang` and `strands_vllm` (strands-agents {}). What a passing test
checks is the same here. The tests use mocks: [Compatibility](compatibility.md) has results with real engines. Tests
that do not pass are listed with the reason.

*Pass unpatched* counts the tests that pass with only the packages replaced. Other tests use private names of
strands-sglang; for these `tools/peers_shim.py` has adapters with the same visible behaviour. `python
tools/peers_tests.py` runs all tests from the projects' source distributions, and writes this page."""
NO_REASON = "No reason yet."


@dataclass(frozen=True)
class Suite:
    """A peer's unit tests, or those of its provider.

    Attributes:
        project: Its name on PyPI.
        version: The pinned version.
        sha256: The hash of its source distribution.
        tests: Files and folders to run, relative to its root.
    """

    project: str
    version: str
    sha256: str
    tests: tuple[str, ...] = ("tests/unit",)

    @property
    def title(self) -> str:
        """The heading of its section."""
        return f"{self.project} {self.version}"


SUITES = (
    Suite("strands-sglang", "0.4.3", "79a084a700b210030703ee6d5a927f7626612be1e041d8fb314e3fb3efa662e4"),
    Suite("strands-sglang", "0.6.2", "2855adfe45e446d5e54bc5c942a31ada0de94ae4045173a46464d6636decb764"),
    Suite("strands-vllm", "0.0.6", "d3c8c267524aad4d5a8b9607882589e149df8097c091c3f90f87ac0ed522c070"),
    Suite(
        "strands-env",
        "0.5.1",
        "15801126e8389d127fec833f2e6997ff52e26fcab33991227990c7a74d89ac5b",
        (
            "tests/unit/core/test_models.py",
            "tests/unit/core/test_environment.py",
            "tests/unit/core/test_types.py",
            "tests/unit/eval/test_evaluator.py",
        ),
    ),
    Suite(
        "strands-env",
        "0.7.3",
        "470f45a09a13a2ed40b949b9c398b2bb898ffc1cca827297cdc56bbc96961a2b",
        (
            "tests/unit/core/test_models.py",
            "tests/unit/core/test_environment.py",
            "tests/unit/core/test_types.py",
            "tests/unit/eval/test_evaluator.py",
            "tests/unit/environments/tau2_bench/test_simulator.py",
        ),
    ),
)

OLDER = (
    Suite("strands-sglang", "0.0.3", "21b9306c8b1a8d912883b2391e7f1532aead61a483f7153973973e60a8244c66"),
    Suite("strands-sglang", "0.2.7", "fec3bc76e42b24851f3f94827a21f65d58fe60ba8a919ea6b298324c0fb4b1dd"),
)
"""Releases whose READMEs the integration tests run."""


def source_of(project: str, version: str) -> Path:
    """Return the folder of an unpacked source distribution."""
    return fetched(next(suite for suite in (*SUITES, *OLDER) if suite.title == f"{project} {version}"))


@dataclass(frozen=True)
class Outcome:
    """One test: its name, relative to the suite's root, and the error that it raised, or None."""

    name: str
    raised: str | None


def fetched(suite: Suite) -> Path:
    """Return the folder of the unpacked source distribution in the user's cache; fetch it if necessary."""
    folder = cache_dir() / "peers" / f"{suite.project}-{suite.version}-{suite.sha256[:12]}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(f"{suite.project}=={suite.version} --hash=sha256:{suite.sha256}\n")
        options = ["--no-deps", f"--no-binary={suite.project}", "--ignore-requires-python", "--require-hashes", "-q"]
        download = [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements), "-d", scratch]
        subprocess.run(download, check=True)
        archive = next(Path(scratch).glob("*.tar.gz"))
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(next(path for path in Path(scratch).iterdir() if path.is_dir()), folder)
    return folder


def environment() -> Path:
    """Return the interpreter of an environment with our and the tests' dependencies; create it if necessary."""
    folder = cache_dir() / "peers" / "tests"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        maker = interpreter("3.12")
        if maker is None:
            raise SystemExit("The peers' tests need Python 3.12: install it, or give an interpreter with --python.")
        subprocess.run([maker, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{ROOT}[dev]"]
        subprocess.run([*install, *NEEDED], check=True)
        (folder / ".ready").touch()
    return python


def run(suite: Suite, python: Path, *, alone: bool = False) -> list[Outcome]:
    """Run a suite's tests on a copy, and return their outcomes; `alone` changes the import and patches nothing."""
    source = fetched(suite)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(source / "tests", Path(scratch, "tests"))
        paths = [str(ROOT / "src"), str(ROOT / "tools"), scratch]
        if suite.project == "strands-env":  # its own code runs, on our packages
            paths.append(str(source / "src"))
        report = Path(scratch, "report.xml")
        options = ["-q", "-p", "peers_shim", "-o", "asyncio_mode=auto", *SCOPE, "--timeout=60", f"--junitxml={report}"]
        command = [str(python), "-m", "pytest", "-c", os.devnull, f"--rootdir={scratch}", *options, *suite.tests]
        clean = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        clean["TITO_PEERS_ALONE"] = str(int(alone))
        subprocess.run(command, cwd=scratch, env=clean, check=False)
        return list(outcomes(report))


def outcomes(report: Path) -> Iterator[Outcome]:
    """Yield the outcomes of pytest's report; a skipped test counts as not passed."""
    for case in ElementTree.parse(report).iter("testcase"):
        parts = [part for part in case.get("classname", "").split(".") if part not in ("tests", "unit")]
        name = "::".join(filter(None, [".".join(parts), case.get("name", "")]))
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        yield Outcome(name, (bad[0].get("message") or bad[0].tag).splitlines()[0] if bad else None)


def reason_of(name: str, reasons: Mapping[str, str]) -> str:
    """Return the reason of the first pattern that matches a test's name."""
    return next((text for pattern, text in reasons.items() if fnmatch.fnmatchcase(name, pattern)), NO_REASON)


def touched(test: Outcome) -> str:
    """Return the private name that a test touches, from the error that it raised."""
    found = re.search(r"'(\w+)' (?:object )?has no attribute '(_\w+)'", str(test.raised))
    return f"{found[1]}.{found[2]}" if found else "SGLangClient._get_session"


def page(
    found: Mapping[Suite, Sequence[Outcome]],
    reasons: Mapping[str, str],
    alone: Mapping[Suite, Sequence[Outcome]] | None = None,
) -> str:
    """Return the page; `alone` has the outcomes with nothing patched, by default the same."""
    alone = alone or found
    rows = [(suite.title, len(tests), passed_in(tests), passed_in(alone[suite])) for suite, tests in found.items()]
    lines = [
        "# Tests of strands-sglang, strands-vllm and strands-env",
        "",
        ABOUT.format(version("strands-agents")),
        "",
        "| tests of | tests | pass | do not pass | pass unpatched |",
        "| --- | --: | --: | --: | --: |",
        *(f"| {title} | {total} | {passed} | {total - passed} | {pure} |" for title, total, passed, pure in rows),
    ]
    for suite, tests in found.items():
        by_reason: dict[str, list[str]] = {}
        for test in tests:
            if test.raised is not None:
                by_reason.setdefault(reason_of(test.name, reasons), []).append(test.name)
        lines += ["", f"## {suite.title}", ""]
        lines += ["All pass."] if not by_reason else ["| do not pass | why |", "| --- | --- |"]
        for reason, names in by_reason.items():
            lines.append(f"| {listed(names)} | {reason} |")
        lines += private_names(tests, alone[suite])
    return "\n".join(lines) + "\n"


def private_names(tests: Sequence[Outcome], alone: Sequence[Outcome]) -> list[str]:
    """Return the table of the tests that pass only with the adapters, by the private name that they touch."""
    passed = {test.name for test in tests if test.raised is None}
    by_name: dict[str, list[str]] = {}
    for test in alone:
        if test.raised is not None and test.name in passed:
            by_name.setdefault(touched(test), []).append(test.name)
    if not by_name:
        return []
    rows = [f"| `{name}` | {len(names)} | {listed_by_class(names)} |" for name, names in by_name.items()]
    return ["", "| private name | tests | pass only with its adapter |", "| --- | --: | --- |", *rows]


def listed(names: Sequence[str]) -> str:
    """Return names as the content of a table cell."""
    return "<br>".join(f"`{name}`" for name in names)


def listed_by_class(names: Sequence[str]) -> str:
    """Return names as the content of a table cell; several tests of a class as its name and their number."""
    classes = Counter(name.split("::")[0] for name in names)
    single = {name.split("::")[0]: f"`{name}`" for name in names}
    return "<br>".join(f"`{each}` ({count})" if count > 1 else single[each] for each, count in classes.items())


def passed_in(tests: Sequence[Outcome]) -> int:
    """Return the number of tests that passed."""
    return sum(test.raised is None for test in tests)


def main() -> None:
    """Run all suites and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter with all dependencies, instead of the environment")
    python = parser.parse_args().python or environment()
    found = {suite: run(suite, python) for suite in SUITES}
    alone = {suite: run(suite, python, alone=True) for suite in SUITES}
    for tests in found.values():
        for test in tests:
            if test.raised is not None:
                print(f"{test.name}: {test.raised[:150]}", file=sys.stderr)
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))["reasons"]
    PAGE.write_text(page(found, reasons, alone), encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
