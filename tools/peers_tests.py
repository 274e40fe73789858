"""Run the unit tests of strands-env that use a model with only the import changed; write evidence/peers_tests.md.

    python tools/peers_tests.py [--python PATH]

pip fetches each source distribution with its pinned sha256 into the user's cache, and a copy of it runs in a temporary
folder, with tito_sglang in place of strands_sglang; the repository keeps nothing of them. The tests run in their own
environment, on Python 3.12.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

from bench import interpreter  # noqa: E402

from tito_engines.spec import cache_dir  # noqa: E402

PAGE = ROOT / "evidence" / "peers_tests.md"
NEEDED = ("pybase64", "openai", "boto3", "cachetools", "aiolimiter", "click", "tqdm", "python-dotenv", "pytest-timeout")
"""Packages that the tests import, besides pytest and ours."""
SCOPE = ("-o", "asyncio_default_fixture_loop_scope=function")
ABOUT = """\
The unit tests of strands-env that use a model run with only the import changed: `tito_sglang` in place of
`strands_sglang` (strands-agents {}). The tests use mocks: [Compatibility](../docs/compatibility.md) has results with
real engines. `python tools/peers_tests.py` runs them from the source distributions, and writes this page."""
SKIPPED = "Skipped: litellm is not installed. The same with strands-sglang 0.4.2."
NEWER = "It resolves type hints of a newer OpenTelemetry. It fails in the same way with strands-sglang 0.4.2."
NO_REASON = "No reason yet."


@dataclass(frozen=True)
class Suite:
    """A release, and the unit tests of it that run here.

    Attributes:
        project: Its name on PyPI.
        version: The pinned version.
        sha256: The hash of its source distribution.
        tests: Files and folders to run, relative to its root.
        reasons: Why a test does not pass, by its name.
    """

    project: str
    version: str
    sha256: str
    tests: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def title(self) -> str:
        """The heading of its section."""
        return f"{self.project} {self.version}"


_CORE = ("core/test_models.py", "core/test_environment.py", "core/test_types.py", "eval/test_evaluator.py")
_ENV = tuple(f"tests/unit/{each}" for each in _CORE)
SUITES = (
    Suite(
        "strands-env",
        "0.5.1",
        "15801126e8389d127fec833f2e6997ff52e26fcab33991227990c7a74d89ac5b",
        _ENV,
        {
            "core.test_models.TestKimiModelFactory::test_remaps_max_new_tokens": SKIPPED,
            "core.test_models.TestKimiModelFactory::test_preserves_reasoning_content": SKIPPED,
            "core.test_environment.TestEnvironmentConfigTypeHints::test_type_hints_resolve": NEWER,
        },
    ),
    Suite(
        "strands-env",
        "0.7.3",
        "470f45a09a13a2ed40b949b9c398b2bb898ffc1cca827297cdc56bbc96961a2b",
        (*_ENV, "tests/unit/environments/tau2_bench/test_simulator.py"),
    ),
)
OTHERS = (
    Suite("strands-sglang", "0.0.3", "21b9306c8b1a8d912883b2391e7f1532aead61a483f7153973973e60a8244c66"),
    Suite("strands-sglang", "0.2.7", "fec3bc76e42b24851f3f94827a21f65d58fe60ba8a919ea6b298324c0fb4b1dd"),
    Suite("strands-sglang", "0.4.3", "79a084a700b210030703ee6d5a927f7626612be1e041d8fb314e3fb3efa662e4"),
    Suite("strands-sglang", "0.6.2", "2855adfe45e446d5e54bc5c942a31ada0de94ae4045173a46464d6636decb764"),
    Suite("strands-vllm", "0.0.6", "d3c8c267524aad4d5a8b9607882589e149df8097c091c3f90f87ac0ed522c070"),
)
"""Releases whose READMEs the integration tests run."""


def source_of(project: str, version: str) -> Path:
    """Return the folder of an unpacked source distribution."""
    return fetched(next(suite for suite in (*SUITES, *OTHERS) if suite.title == f"{project} {version}"))


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


def run(suite: Suite, python: Path) -> list[Outcome]:
    """Run a suite's tests on a copy in which only the import is changed, and return their outcomes."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(fetched(suite), scratch, dirs_exist_ok=True)
        for path in Path(scratch).rglob("*.py"):
            code = path.read_text("utf-8")
            path.write_text(code.replace("strands_sglang", "tito_sglang"), "utf-8")
        report = Path(scratch, "report.xml")
        options = ["-q", "-o", "asyncio_mode=auto", *SCOPE, "--timeout=60", f"--junitxml={report}"]
        command = [str(python), "-m", "pytest", "-c", os.devnull, f"--rootdir={scratch}", *options, *suite.tests]
        paths = [str(ROOT / "src"), scratch, str(Path(scratch, "src"))]
        clean = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(command, cwd=scratch, env=clean, check=False)
        return list(outcomes(report))


def outcomes(report: Path) -> Iterator[Outcome]:
    """Yield the outcomes of pytest's report; a skipped test counts as not passed."""
    for case in ElementTree.parse(report).iter("testcase"):
        parts = [part for part in case.get("classname", "").split(".") if part not in ("tests", "unit")]
        name = "::".join(filter(None, [".".join(parts), case.get("name", "")]))
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        yield Outcome(name, (bad[0].get("message") or bad[0].tag).splitlines()[0] if bad else None)


def page(found: Mapping[Suite, Sequence[Outcome]]) -> str:
    """Return the page."""
    lines = [
        "# Tests of strands-env",
        "",
        ABOUT.format(version("strands-agents")),
        "",
        "| tests of | tests | pass | do not pass |",
        "| --- | --: | --: | --- |",
    ]
    for suite, tests in found.items():
        failed = [test.name for test in tests if test.raised is not None]
        why = "<br>".join(f"`{name}`: {suite.reasons.get(name, NO_REASON)}" for name in failed)
        lines.append(f"| {suite.title} | {len(tests)} | {len(tests) - len(failed)} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all suites and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter with all dependencies, instead of the environment")
    python = parser.parse_args().python or environment()
    found = {suite: run(suite, python) for suite in SUITES}
    for tests in found.values():
        for test in tests:
            if test.raised is not None:
                print(f"{test.name}: {test.raised[:150]}", file=sys.stderr)
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
