"""Build a cached directory once, atomically, under a lock."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "tito_build.json"
Report = Callable[[str], None]


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


def manifest(directory: Path) -> dict[str, object] | None:
    """Return the manifest of a built directory, or None if it is missing or unreadable."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_whole(target: Path) -> bool:
    """Return whether a directory has every file of its manifest, at its size."""
    found = manifest(target)
    files = found.get("files") if found else None
    return isinstance(files, dict) and files == _sizes(target)


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
