"""Directories that are built once into the user's cache, whole or not at all: models, packages, engines."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from tito_engines.errors import Cancelled

MANIFEST = "tito_build.json"
"""Written last: a directory without this file is unfinished."""


def build_once(
    target: Path,
    build: Callable[[Path], None],
    *,
    about: Mapping[str, object] | None = None,
    watched: str = "**/*",
    report: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Return `target`; run `build(target)` first if it is absent, unfinished or damaged.

    Concurrent callers, also of other processes, wait on a lock, and the first one builds. The manifest, written last,
    holds `about` and the size of each file that `watched` matches; a directory that differs from it is built again. If
    `build` raises, nothing is left behind.

    Raises:
        Cancelled: `cancel` was set while another process built.
    """
    if is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            if report:
                report(f"waiting for another process to build {target.name}")
            if cancel and cancel.is_set():
                raise Cancelled(f"Waiting for another process to build {target.name} was cancelled.") from None
    try:
        if not is_whole(target):
            _build(target, build, about or {}, watched)
    finally:
        lock.release()
    return target


def _build(target: Path, build: Callable[[Path], None], about: Mapping[str, object], watched: str) -> None:
    if target.exists():  # left by a killed process, since the lock is held
        shutil.rmtree(target)
    target.mkdir()
    try:
        build(target)
        found = (path for path in sorted(target.glob(watched)) if path.is_file())
        sizes = {path.relative_to(target).as_posix(): path.lstat().st_size for path in found}
        text = json.dumps({**about, "files": sizes}, indent=2)
        (target / MANIFEST).write_text(text + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def is_whole(target: Path) -> bool:
    """Return whether a directory has every file of its manifest, at its size."""
    files = (manifest(target) or {}).get("files")
    return isinstance(files, dict) and all(
        (target / name).is_file() and (target / name).lstat().st_size == size for name, size in files.items()
    )


def manifest(directory: Path) -> dict[str, object] | None:
    """Return the manifest of a built directory, or None if it is missing or unreadable."""
    try:
        found = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
