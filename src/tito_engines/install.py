"""Install an engine into an environment of its own, once for each lock, with the venv and pip of a suitable Python."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tito_engines import child_process
from tito_engines.cache import build_once, is_whole
from tito_engines.errors import ANY_SERVER, CannotInstall, InstallFailed
from tito_engines.spec import EngineSpec, engines_dir, megabytes, pins, standin_files
from tito_engines.terminal import ProgressCallback, silent

TORCH_INDEX_VARIABLE = "TITO_TORCH_INDEX"
UV = (sys.executable, "-m", "uv")
"""uv, which finds PyTorch's own index of CPU builds. Of the extra `engines`."""
NO_TORCH = re.compile(
    # The last alternative is pip's message if its configuration constrains torch.
    r"(?:No matching distribution found for|Could not find a version that satisfies the requirement|Cannot install)"
    r" torch\b"
)
"""What pip says where its indexes have no such build of torch."""


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
        python: The interpreter for the environment; see `choose`.
        torch_index: URL of a package index with CPU builds of torch, besides the configured ones. The environment
            variable `TITO_TORCH_INDEX` sets it too. If none of them has one, uv looks in PyTorch's own index.
        progress: Called with the current step.
        cancel: Set it from another thread to cancel the installation.

    Raises:
        CannotInstall: The engine does not support this machine, the disk has too little space, or psutil is missing.
        InstallFailed: A step failed; has its last lines of output.
        Cancelled: `cancel` was set.
    """
    child_process.check_psutil()
    report, cancel = progress or silent, cancel or threading.Event()
    interpreter, minor = choose(spec, python)
    root = environment_dir(spec, minor)
    if not is_whole(root):
        check_room(spec, minor)
        index = torch_index or os.environ.get(TORCH_INDEX_VARIABLE)
        build = functools.partial(
            _install, spec=spec, interpreter=interpreter, minor=minor, index=index, report=report, cancel=cancel
        )
        about = {"engine": spec.title, "python": minor}
        build_once(root, build, about=about, watched="bin/python", report=report, cancel=cancel)
    return EngineEnv(root / "bin" / "python", root, spec)


def environment_dir(spec: EngineSpec, minor: str) -> Path:
    """Return the path of the environment for a Python minor version, whether or not it exists."""
    return engines_dir() / f"{spec.name}-{spec.key(minor)}-py{minor.replace('.', '')}"


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


def _install(
    root: Path,
    *,
    spec: EngineSpec,
    interpreter: Path,
    minor: str,
    index: str | None,
    report: ProgressCallback,
    cancel: threading.Event,
) -> None:
    began, python, pinned = time.monotonic(), root / "bin" / "python", pins(spec.locks[minor])
    run = functools.partial(_run, spec, cancel=cancel)
    size = megabytes(spec.locks[minor], "download")
    fetched = f", then fetching about {size:.0f} MB" if size else ""
    report(f"{spec.name}: creating an environment with Python {minor}{fetched}")
    run("create the environment", interpreter, "-m", "venv", *([] if pinned else ["--without-pip"]), root)
    if pinned:
        # torch first: an index without its CPU build is then noticed at once, not after the other downloads.
        pinned.sort(key=lambda pin: not pin.startswith("torch=="))
        requirements = root / "requirements.txt"
        requirements.write_text("\n".join(pinned) + "\n", encoding="utf-8")
        # Not compiled: a server imports a third of the installed modules, and pip would compile all of them.
        options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--no-compile", "--progress-bar", "off"]
        options += ["--extra-index-url", index] if index else []
        with tempfile.TemporaryDirectory(dir=root) as downloads:  # its disk has room, /tmp perhaps not
            command = (python, "-m", "pip", "install", *options, "-r", requirements)
            run = functools.partial(run, variables={"TMPDIR": downloads}, report=report)
            try:
                run("install its packages", *command)
            except InstallFailed as error:
                if not NO_TORCH.search(str(error)):
                    raise
                report(f"{spec.name}: pip finds no CPU build of torch; looking in PyTorch's own index")
                where = ("--python", python, "--no-deps", "--torch-backend", "cpu", pinned[0])
                run("find a CPU build of torch", *UV, "pip", "install", *where, hint=TORCH_HINT)
                run("install its packages", *command)
    _add_standins(spec, root, minor)
    report(f"{spec.name}: checking that it can be imported")
    run("import the engine", python, "-c", spec.import_check, variables=spec.check_env)
    report(f"{spec.name}: installed in {time.monotonic() - began:.0f} s", 1.0)


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


TORCH_HINT = (
    "No CPU build of torch for this Python was found, neither in pip's configured indexes nor by uv in PyTorch's own. "
    "Is that index reachable (a proxy)? Else name one that has it, such as a mirror: --torch-index URL, "
    "TITO_TORCH_INDEX=URL or `make demo TORCH_INDEX=URL`. pytorch.org/get-started/locally shows the address of "
    "PyTorch's own for pip and CPU."
)
HINTS = (
    (r"No space left on device", "Free some disk space, then try again; `TITO_CACHE_DIR` moves the cache elsewhere."),
    (NO_TORCH.pattern, TORCH_HINT),
    (
        r"ConnectionError|ReadTimeout|Connection broken|Temporary failure in name resolution|NewConnectionError",
        "The package index could not be reached: check the network and pip's proxy settings. pip keeps what it has "
        "already downloaded.",
    ),
    (
        r"No matching distribution found",
        "The configured package indexes lack a pinned package: check pip's index settings.",
    ),
)


def explain(spec: EngineSpec, aim: str, status: int, lines: list[str], hint: str = "") -> str:
    """Return the error message of a failed installation: what failed, a hint and the last lines of output."""
    text = "\n".join(lines[-200:])
    found = (hint for pattern, hint in HINTS if re.search(pattern, text))
    hint = hint or next(found, "Try again; pip keeps its downloads.")
    shown = "\n".join([f"  {line}" for line in lines if not line.startswith("WARNING")][-15:])
    return (
        f"Installing {spec.title} failed: could not {aim} (exit status {status}). {hint} Last lines of output:\n{shown}"
    )


def _run(
    spec: EngineSpec,
    aim: str,
    *argv: str | Path,
    cancel: threading.Event,
    variables: Mapping[str, str] | None = None,
    report: ProgressCallback = silent,
    hint: str = "",
) -> None:
    lines: list[str] = []
    tool = argv[2] if argv[1] == "-m" else "python"

    def take(line: str) -> None:
        # "" stands for half a second without output; the command's end is not that of a server.
        if line and not line.startswith("supervisor: the server"):
            lines.append(line)
            report(f"{spec.name}: {tool}: {line.strip().partition(' (from ')[0][:100]}")

    variables = child_process.environment(Path(argv[0]), variables or {})
    status = child_process.run([str(word) for word in argv], variables, take, cancel)
    if status != 0:
        raise InstallFailed(explain(spec, aim, status, lines, hint))


_PROBE = "import ensurepip, sys, venv; print(sys.implementation.name, '%d.%d' % sys.version_info[:2] + sys.abiflags)"


def choose(spec: EngineSpec, requested: Path | None = None) -> tuple[Path, str]:
    """Return an interpreter and its minor version: `requested`, else the running one, else the first one on the PATH.

    Raises:
        CannotInstall: The engine does not support this machine, or no interpreter is suitable.
    """
    check_machine(spec)
    names = [requested] if requested else [sys.executable, *(f"python{minor}" for minor in sorted(spec.locks))]
    tried = []
    for path in filter(None, map(shutil.which, names)):
        try:
            answer = subprocess.run([path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=30, check=False)
            words = answer.stdout.split() or answer.stderr.splitlines()[-1:]
        except (OSError, subprocess.TimeoutExpired) as error:
            words = [str(error)]
        if words[:1] == ["cpython"] and words[-1] in spec.locks:
            return Path(path), words[-1]
        tried.append(f"{path}: {' '.join(words) or 'it does not run'}")
    raise CannotInstall(
        f"{spec.title} needs Python {' or '.join(sorted(spec.locks))} with its venv module (Debian, Ubuntu: apt "
        f"install python3-venv), and found {'; '.join(tried) or f'nothing to run at {requested}'}. Install one, or "
        f"give its path with --python. {ANY_SERVER}"
    )


def check_machine(spec: EngineSpec) -> None:
    """Check that the engine supports this system, processor and C library.

    Raises:
        CannotInstall: It does not.
    """
    system, machine = platform.system(), platform.machine()
    runs_on = " or ".join(f"{s} on {m}" for s, m in sorted(spec.systems))
    here = f"{system} on {machine}"
    if (system, machine) in spec.systems:
        if system != "Linux" or platform.libc_ver()[0] == "glibc":
            return
        here += " without glibc"
    raise CannotInstall(f"{spec.title} can be installed on {runs_on}; this is {here}. {ANY_SERVER}")
