"""Build a directory once: atomically, under a lock, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "tito_build.json"
Say = Callable[[str], None]


def build_once(
    target: Path, build: Callable[[Path], None], *, about: Mapping[str, object] | None = None, say: Say | None = None
) -> Path:
    """Return `target`, after running `build(directory)` if it is absent or damaged.

    `build` fills a temporary sibling that is renamed to `target` when it is done, so a reader sees a whole directory
    or none. Processes and threads that ask at once queue on a lock and the first one builds. The manifest, written
    last, holds `about` and the size of each file; a directory that no longer agrees with it is built again.
    What `build` raises comes through, and leaves nothing behind.
    """
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        if say:
            say(f"waiting for another process that is building {target.name}")
        lock.acquire()
    try:
        if not _is_whole(target):
            _build_aside(target, build, about or {})
    finally:
        lock.release()
    return target


def manifest(directory: Path) -> dict[str, object] | None:
    """The manifest of a built directory, or None where there is none to read."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_whole(target: Path) -> bool:
    found = manifest(target)
    files = found.get("files") if found else None
    return isinstance(files, dict) and files == _sizes(target)


def _sizes(directory: Path) -> dict[str, int]:
    return {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def _build_aside(target: Path, build: Callable[[Path], None], about: Mapping[str, object]) -> None:
    prefix = f".{target.name}.part-"
    # We hold the lock, so an aside directory that is there was left by a build that was killed.
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(aside)
        text = json.dumps({**about, "files": _sizes(aside)}, indent=2)
        (aside / MANIFEST).write_text(text + "\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
