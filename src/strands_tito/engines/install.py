"""Install an engine into an environment of its own, once for each lock."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from strands_tito.engines import pip_run, supervised
from strands_tito.engines.errors import Cancelled, CannotInstall, InstallFailed
from strands_tito.engines.interpreters import Interpreter, choose
from strands_tito.engines.locations import engines_dir
from strands_tito.engines.progress import Say, silent
from strands_tito.engines.spec import RECIPE, EngineSpec, megabytes, pins, standin_files

MARKER = "tito_engine.json"
"""Written last: an environment without it is a half-done one."""
TORCH_INDEX_VARIABLE = "TITO_TORCH_INDEX"


@dataclass(frozen=True, slots=True)
class EngineEnv:
    """An environment with an engine in it."""

    python: Path
    root: Path
    spec: EngineSpec


def ensure(
    spec: EngineSpec,
    *,
    python: Path | None = None,
    torch_index: str | None = None,
    progress: Say | None = None,
    cancel: threading.Event | None = None,
) -> EngineEnv:
    """The engine's environment, installed by the first call and found by all later ones.

    It lies in the cache directory under a name that its lock, our stand-ins and the Python version make, so a changed
    lock is a new environment. Processes that ask at once install once: the others wait. An environment whose
    installation was broken off is made anew. `python` makes the environment (see `interpreters.choose`);
    `torch_index` is the address of a package index with CPU builds of torch, needed where the configured ones have
    none (`TITO_TORCH_INDEX` says the same); `cancel` set from another thread breaks the work off.

    Raises CannotInstall where this machine will not do, InstallFailed with the last lines of what failed, Cancelled.
    """
    say, cancel = progress or silent, cancel or threading.Event()
    interpreter = choose(spec, python)
    root = environment_dir(spec, interpreter.minor)
    if is_complete(root):
        return EngineEnv(root / "bin" / "python", root, spec)
    check_room(spec, interpreter.minor)
    lock = FileLock(root.parent / f".{root.name}.lock")
    _acquire(lock, spec, say, cancel)
    try:
        if not is_complete(root):
            if root.exists():
                say(f"{spec.name}: an unfinished environment is removed and made anew")
                shutil.rmtree(root)
            index = torch_index or os.environ.get(TORCH_INDEX_VARIABLE) or None
            _install(spec, interpreter, root, index, say, cancel)
    finally:
        lock.release()
    return EngineEnv(root / "bin" / "python", root, spec)


def environment_dir(spec: EngineSpec, minor: str) -> Path:
    """Where the environment for that Python minor version lies, whether or not it is there."""
    return engines_dir() / f"{spec.name}-{spec.key(minor)}-py{minor.replace('.', '')}"


def is_complete(root: Path) -> bool:
    """Whether the installation ran to its end, and the Python it was made with is still there."""
    return (root / MARKER).is_file() and (root / "bin" / "python").exists()


def check_room(spec: EngineSpec, minor: str) -> None:
    """Make the cache directory. Raises CannotInstall where that fails or the disk has too little room."""
    folder, needed = engines_dir(), megabytes(spec.locks[minor], "disk") or 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free / 1e6
    except OSError as error:
        raise CannotInstall(f"{folder} cannot be made ({error}): set TITO_CACHE_DIR to a folder of yours.") from None
    if free < needed:
        raise CannotInstall(
            f"{spec.title} takes up to {needed:.0f} MB, and {folder} has {free:.0f} MB left: free some, or set "
            "TITO_CACHE_DIR to a folder on another disk."
        )


def _acquire(lock: FileLock, spec: EngineSpec, say: Say, cancel: threading.Event) -> None:
    while True:
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            say(f"{spec.name}: waiting for another process that is installing it")
            if cancel.is_set():
                raise Cancelled(f"The wait for another installation of {spec.name} was cancelled.") from None
        else:
            return


def _install(
    spec: EngineSpec, interpreter: Interpreter, root: Path, index: str | None, say: Say, cancel: threading.Event
) -> None:
    began = time.monotonic()
    python = root / "bin" / "python"
    say(f"{spec.name}: making an environment with Python {interpreter.minor}")
    make = [str(interpreter.path), "-m", "venv", str(root)]
    if not pins(spec.locks[interpreter.minor]):
        make.append("--without-pip")
    _run(spec, make, interpreter.path, {}, cancel, "make its environment")
    pip_run.install(spec, python, root / "requirements.txt", index, say, cancel, interpreter.minor)
    _add_standins(spec, root, interpreter.minor)
    say(f"{spec.name}: checking that it can be imported")
    _run(spec, [str(python), "-c", spec.import_check], python, spec.check_env, cancel, "be imported once installed")
    marker = {"engine": spec.title, "recipe": RECIPE, "python": interpreter.minor, "seconds": time.monotonic() - began}
    aside = root / f"{MARKER}.part"
    aside.write_text(json.dumps(marker) + "\n", encoding="utf-8")
    os.replace(aside, root / MARKER)
    say(f"{spec.name}: installed in {marker['seconds']:.0f} s", 1.0)


def _add_standins(spec: EngineSpec, root: Path, minor: str) -> None:
    """Copy the stand-ins into the environment: it then stands alone, and every Python started in it has them."""
    if spec.standins is None:
        return
    for path in standin_files(spec.standins):
        target = root / "standins" / path.relative_to(spec.standins)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    lines = [str(root / "standins"), f"import {spec.standin_startup}" if spec.standin_startup else ""]
    pth = root / "lib" / f"python{minor}" / "site-packages" / "tito_standins.pth"
    pth.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(
    spec: EngineSpec, argv: list[str], python: Path, extra: Mapping[str, str], cancel: threading.Event, aim: str
) -> None:
    said: list[str] = []
    status = supervised.run(argv, supervised.environment(python, extra), said.append, cancel)
    if status != 0:
        shown = "\n".join([f"  {line}" for line in said if line][-15:])
        raise InstallFailed(
            f"{spec.title} could not {aim}: {argv[0]} ended with status {status}. Its last lines:\n{shown}"
        )
