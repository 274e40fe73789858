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

from strands_tito.engines import child_process, pip_run
from strands_tito.engines.errors import Cancelled, CannotInstall, InstallFailed
from strands_tito.engines.interpreters import Interpreter, choose
from strands_tito.engines.locations import engines_dir
from strands_tito.engines.progress import ProgressCallback, silent
from strands_tito.engines.spec import RECIPE, EngineSpec, megabytes, pins, standin_files

MARKER = "tito_engine.json"
"""Written last: an environment without this file is unfinished."""
TORCH_INDEX_VARIABLE = "TITO_TORCH_INDEX"


@dataclass(frozen=True, slots=True)
class EngineEnv:
    """An environment in which an engine is installed."""

    python: Path
    root: Path
    spec: EngineSpec


def ensure(
    spec: EngineSpec,
    *,
    python: Path | None = None,
    torch_index: str | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> EngineEnv:
    """Return the engine's environment; install it if it does not exist.

    The environment is in the cache directory; its name depends on the lock, our stand-ins and the Python version, so
    that a changed lock makes a new environment. If several processes call this at once, one installs and the others
    wait. An unfinished environment is removed and installed again.

    Args:
        spec: The engine.
        python: The interpreter for the environment; see `interpreters.choose`.
        torch_index: URL of a package index with CPU builds of torch, if the configured indexes have none. The
            environment variable `TITO_TORCH_INDEX` sets it too.
        progress: Called with the current step.
        cancel: Set it from another thread to cancel the installation.

    Raises:
        CannotInstall: The engine does not support this machine, or the disk has too little space.
        InstallFailed: A step failed; has its last lines of output.
        Cancelled: `cancel` was set.
    """
    report, cancel = progress or silent, cancel or threading.Event()
    interpreter = choose(spec, python)
    root = environment_dir(spec, interpreter.minor)
    if is_complete(root):
        return EngineEnv(root / "bin" / "python", root, spec)
    check_room(spec, interpreter.minor)
    lock = FileLock(root.parent / f".{root.name}.lock")
    _acquire(lock, spec, report, cancel)
    try:
        if not is_complete(root):
            if root.exists():
                report(f"{spec.name}: removing an unfinished environment")
                shutil.rmtree(root)
            index = torch_index or os.environ.get(TORCH_INDEX_VARIABLE) or None
            _install(spec, interpreter, root, index, report, cancel)
    finally:
        lock.release()
    return EngineEnv(root / "bin" / "python", root, spec)


def environment_dir(spec: EngineSpec, minor: str) -> Path:
    """Return the path of the environment for a Python minor version, whether or not it exists."""
    return engines_dir() / f"{spec.name}-{spec.key(minor)}-py{minor.replace('.', '')}"


def is_complete(root: Path) -> bool:
    """Return whether the installation has finished and its Python still exists."""
    return (root / MARKER).is_file() and (root / "bin" / "python").exists()


def check_room(spec: EngineSpec, minor: str) -> None:
    """Create the cache directory and check the free disk space.

    Raises:
        CannotInstall: The directory cannot be created, or the disk has too little space.
    """
    folder, needed = engines_dir(), megabytes(spec.locks[minor], "disk") or 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free / 1e6
    except OSError as error:
        raise CannotInstall(
            f"{folder} cannot be created ({error}): set TITO_CACHE_DIR to a folder that you can write to."
        ) from None
    if free < needed:
        raise CannotInstall(
            f"{spec.title} needs up to {needed:.0f} MB, but {folder} has {free:.0f} MB left: free some space, or set "
            "TITO_CACHE_DIR to a folder on another disk."
        )


def _acquire(lock: FileLock, spec: EngineSpec, report: ProgressCallback, cancel: threading.Event) -> None:
    while True:
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            report(f"{spec.name}: waiting for another process to install it")
            if cancel.is_set():
                raise Cancelled(f"Waiting for another installation of {spec.name} was cancelled.") from None
        else:
            return


def _install(
    spec: EngineSpec,
    interpreter: Interpreter,
    root: Path,
    index: str | None,
    report: ProgressCallback,
    cancel: threading.Event,
) -> None:
    began = time.monotonic()
    python = root / "bin" / "python"
    report(f"{spec.name}: creating an environment with Python {interpreter.minor}")
    make = [str(interpreter.path), "-m", "venv", str(root)]
    if not pins(spec.locks[interpreter.minor]):
        make.append("--without-pip")
    _run(spec, make, interpreter.path, {}, cancel, "create the environment")
    pip_run.install(spec, python, root / "requirements.txt", index, report, cancel, interpreter.minor)
    _add_standins(spec, root, interpreter.minor)
    report(f"{spec.name}: checking that it can be imported")
    _run(spec, [str(python), "-c", spec.import_check], python, spec.check_env, cancel, "import the engine")
    marker = {"engine": spec.title, "recipe": RECIPE, "python": interpreter.minor, "seconds": time.monotonic() - began}
    aside = root / f"{MARKER}.part"
    aside.write_text(json.dumps(marker) + "\n", encoding="utf-8")
    os.replace(aside, root / MARKER)
    report(f"{spec.name}: installed in {marker['seconds']:.0f} s", 1.0)


def _add_standins(spec: EngineSpec, root: Path, minor: str) -> None:
    """Copy the stand-ins into the environment and put them on the path of every Python started in it."""
    if not spec.standins:
        return
    for name, path in standin_files(spec.standins):
        target = root / "standins" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    lines = [str(root / "standins"), f"import {spec.standin_startup}" if spec.standin_startup else ""]
    pth = root / "lib" / f"python{minor}" / "site-packages" / "tito_standins.pth"
    pth.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(
    spec: EngineSpec, argv: list[str], python: Path, extra: Mapping[str, str], cancel: threading.Event, aim: str
) -> None:
    output: list[str] = []
    status = child_process.run(argv, child_process.environment(python, extra), output.append, cancel)
    if status != 0:
        shown = "\n".join([f"  {line}" for line in output if line][-15:])
        raise InstallFailed(
            f"Installing {spec.title} failed: could not {aim} ({argv[0]} exited with status {status}). "
            f"Last lines of output:\n{shown}"
        )
