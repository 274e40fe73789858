"""Build the sdist and the wheel into dist/, and check what a user would get.

    python tools/package.py               # says so if they are not to be published
    python tools/package.py --to-publish  # builds nothing that is not

The wheel is built from the sdist. `twine check --strict` reads the metadata and the README; the wheel holds every file
of src/, and nothing else; each of its entry points loads; its README links absolutely; neither file is larger than its
limit. Then tests of the unpacked sdist run on the code of the wheel. It needs build, twine, and everything that `make
setup` installs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST_BYTES = {".whl": 1_500_000, ".gz": 6_000_000}
"""The largest size of the wheel and of the sdist."""
TESTS = ("tests/ledger/test_ledger.py", "tests/test_house.py", "tests/test_release.py")
"""Tests of the sdist that run in seconds. It holds all of them."""
LOADS = """
import importlib.metadata, os, sys
for each in sys.argv[1:]:
    importlib.metadata.EntryPoint("", each, "").load()
    loaded = sys.modules[each.partition(":")[0]].__file__
    assert loaded.startswith(os.environ["PYTHONPATH"]), f"{loaded} is not of the wheel"
"""


PLACEHOLDER = "OWNER"
UNOWNED = (
    f"pyproject.toml has {PLACEHOLDER} in place of the repository's owner, so every link of the package is dead. "
    "Before it is published, run make publish-as OWNER=name, and commit what it changed."
)


def main() -> int:
    """Build, check, and print the sizes, or the problems."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--to-publish", action="store_true", help="fail at once while the owner is a placeholder")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    unowned = f"/{PLACEHOLDER}/" in urls["Repository"]
    if parser.parse_args().to_publish and unowned:
        raise SystemExit(UNOWNED)
    for old in DIST.glob("strands_tito-*"):
        old.unlink()
    _python("-m", "build", "--outdir", str(DIST), str(ROOT), quiet=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    _python("-m", "twine", "check", "--strict", str(wheel), str(sdist))
    with tempfile.TemporaryDirectory() as folder:
        code, source = Path(folder, "wheel"), Path(folder, "sdist")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(code)
        with tarfile.open(sdist) as archive:
            archive.extractall(source, filter="data")
        (unpacked,) = source.iterdir()
        problems = [*sizes(wheel, sdist), *contents(code, unpacked)]
        if not problems:
            # PYTHONPATH comes before an editable installation; -P keeps the current folder from coming before both.
            _python("-P", "-c", LOADS, *entry_points(code), path=code, folder=Path(folder))
            only = ["-c", "pyproject.toml", "--override-ini", "pythonpath=tests examples", "-p", "no:cacheprovider"]
            _python("-P", "-m", "pytest", "-q", *only, *TESTS, path=code, folder=unpacked)
    print("\n".join(problems) or f"{wheel.name} {wheel.stat().st_size:,} bytes, sdist {sdist.stat().st_size:,} bytes")
    if unowned:
        print(f"Not to be published: {UNOWNED}")
    return int(bool(problems))


def sizes(*files: Path) -> Iterator[str]:
    """Yield a problem for each file that is larger than its limit."""
    for file in files:
        if (size := file.stat().st_size) > (most := MOST_BYTES[file.suffix]):
            yield f"{file.name} has {size:,} bytes, more than {most:,}: remove what it should not hold."


def contents(code: Path, unpacked: Path) -> Iterator[str]:
    """Yield the files that the wheel or the sdist lacks, or that the wheel has and src/ does not."""
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines())
    yield from (f"The sdist lacks {path}." for path in sorted(tracked) if not (unpacked / path).is_file())
    expected = {path.removeprefix("src/") for path in tracked if path.startswith("src/")}
    found = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    found -= {path for path in found if path.partition("/")[0].endswith(".dist-info")}
    yield from (f"The wheel lacks {path}." for path in sorted(expected - found))
    yield from (f"The wheel has {path}, which is not in src/." for path in sorted(found - expected))
    packages = {path.partition("/")[0] for path in expected}
    yield from (f"{package} has no py.typed." for package in packages if f"{package}/py.typed" not in found)
    if not list(code.glob("*.dist-info/licenses/LICENSE")):
        yield "The wheel has no LICENSE."
    (metadata,) = code.glob("*.dist-info/METADATA")
    for target in re.findall(r"\]\((?!https://)[^)]*\)", metadata.read_text(encoding="utf-8")):
        yield f"The wheel's README has the link {target}, which leads nowhere outside the repository."


def entry_points(code: Path) -> list[str]:
    """Return the object that each entry point and script of the wheel names, as `module:name`."""
    (written,) = code.glob("*.dist-info/entry_points.txt")
    parser = ConfigParser(delimiters="=")
    parser.read(written, encoding="utf-8")
    return [value for section in parser.sections() for value in parser[section].values()]


def _python(*arguments: str, path: Path | None = None, folder: Path = ROOT, quiet: bool = False) -> None:
    """Run Python, with `path` first on its module path; raise SystemExit if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout or ''}\nFailed: python {' '.join(arguments[:4])}")


if __name__ == "__main__":
    sys.exit(main())
