"""Install an engine into an environment of its own, once for each lock, with the venv and pip of a suitable Python."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tito_engines import child_process
from tito_engines.errors import ANY_SERVER, Cancelled, CannotInstall, InstallFailed
from tito_engines.spec import RECIPE, EngineSpec, engines_dir, megabytes, pins, standin_files
from tito_engines.terminal import ProgressCallback, silent

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
        python: The interpreter for the environment; see `choose`.
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
    install(spec, python, root / "requirements.txt", index, report, cancel, interpreter.minor)
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


def install(
    spec: EngineSpec,
    python: Path,
    requirements: Path,
    index: str | None,
    report: ProgressCallback,
    cancel: threading.Event,
    minor: str,
) -> None:
    """Write the lock to `requirements`, at the root of `python`'s environment, and `pip install --no-deps -r` it.

    Raises:
        InstallFailed: pip failed; has its last lines of output.
        Cancelled: `cancel` was set.
    """
    pinned = pins(spec.locks[minor])
    if not pinned:
        return
    # torch first: an index without its CPU build is then noticed at once, not after the other downloads.
    pinned.sort(key=lambda pin: not pin.startswith("torch=="))
    requirements.write_text("\n".join(pinned) + "\n", encoding="utf-8")
    # Not compiled: a server imports a third of the installed modules, and pip would compile all of them.
    argv = [str(python), "-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check",
            "--no-compile", "--progress-bar", "off", "-r", str(requirements)]  # fmt: skip
    if index:
        argv += ["--extra-index-url", index]
    downloads = requirements.parent / "downloads"
    downloads.mkdir()
    progress = PipProgress(
        spec.name, len(pinned), megabytes(spec.locks[minor], "download"), downloads, requirements.parent / "lib"
    )
    last: deque[str] = deque(maxlen=200)

    def on_line(line: str) -> None:
        if line:
            last.append(line)
            progress.take(line)
        progress.report(report)

    env = child_process.environment(python, {"TMPDIR": str(downloads)})
    status = child_process.run(argv, env, on_line, cancel)
    if status != 0:
        raise InstallFailed(explain(spec, status, list(last)))
    shutil.rmtree(downloads, ignore_errors=True)


@dataclass
class PipProgress:
    """Progress of pip, from its output and the folders that it fills."""

    name: str
    packages: int
    total_megabytes: float | None
    downloads: Path
    """Folder of pip's temporary files, including the archives that it downloads."""
    site: Path
    """The environment's `lib` folder."""
    fetched: int = 0
    current: str = ""
    before: frozenset[str] | None = None
    """Packages that existed when pip began to install; None while it downloads."""

    def take(self, line: str) -> None:
        """Process one line of pip's output."""
        if line.startswith(("Collecting ", "Processing ")):
            self.fetched += 1
            self.current = re.split(r"==|-(?=\d)", Path(line.split()[1]).name)[0]
        elif line.startswith("Installing collected packages"):
            self.before = self._present()

    def report(self, report: ProgressCallback) -> None:
        """Report the current progress."""
        if self.before is not None:
            done = len(self._present() - self.before)
            report(f"{self.name}: installing package {done} of {self.packages}", done / self.packages)
            return
        here = megabytes_below(self.downloads)
        of = f" of about {self.total_megabytes:.0f}" if self.total_megabytes else ""
        part = here / self.total_megabytes if self.total_megabytes else self.fetched / self.packages
        text = f"fetching package {self.fetched} of {self.packages}, {here:.0f}{of} MB ({self.current})"
        report(f"{self.name}: {text}", min(part, 1.0))

    def _present(self) -> frozenset[str]:
        return frozenset(path.name for path in self.site.glob("*/site-packages/*.dist-info"))


def megabytes_below(folder: Path) -> float:
    """Return the size of all files below a folder in MB; 0 if it does not exist."""
    total = 0
    for directory, _, names in os.walk(folder):  # unlike rglob, tolerates folders that disappear meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total / 1e6


HINTS = (
    (r"No space left on device", "Free some disk space, then try again; `TITO_CACHE_DIR` moves the cache elsewhere."),
    (
        # The last alternative is pip's message if its configuration constrains torch.
        r"(?:No matching distribution found for|Could not find a version that satisfies the requirement"
        r"|Cannot install) torch\b",
        "The configured package indexes have no CPU build of torch for this Python, but PyTorch's index of CPU wheels "
        "has. Give its URL with --torch-index URL, TITO_TORCH_INDEX=URL, or `make demo TORCH_INDEX=URL`.",
    ),
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


def explain(spec: EngineSpec, status: int, lines: list[str]) -> str:
    """Return the error message of a failed installation: status, hint and pip's last lines."""
    text = "\n".join(lines)
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "Try again; pip keeps its downloads.")
    shown = "\n".join([f"  {line}" for line in lines if not line.startswith("WARNING")][-12:])
    return f"pip could not install {spec.title} (exit status {status}). {hint} Last lines of output:\n{shown}"


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


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A suitable interpreter."""

    path: Path
    minor: str
    """`"3.11"`."""


def choose(spec: EngineSpec, requested: Path | None = None) -> Interpreter:
    """Return `requested`, else the running interpreter, else the first suitable one on the PATH, of pyenv or of uv.

    Raises:
        CannotInstall: The engine does not support this machine, or no interpreter is suitable.
    """
    check_machine(spec)
    versions = "Python " + " or ".join(sorted(spec.locks))
    if requested is not None:
        found, why_not = _inspect(requested, spec)
        if found is None:
            raise CannotInstall(
                f"Cannot install {spec.title} with {requested}: {why_not}. Use {versions} with the venv module. "
                f"{ANY_SERVER}"
            )
        return found
    seen = []
    for path in _candidates(spec):
        found, why_not = _inspect(path, spec)
        if found is not None:
            return found
        seen.append(f"{path}: {why_not}")
    tried = "; ".join(seen[:4])
    raise CannotInstall(
        f"{spec.title} needs {versions} for its environment; none was found ({tried}). "
        f"Install one, or give its path with --python. {ANY_SERVER}"
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


_PROBE = (
    "import json, sys, sysconfig, importlib.util as u;"
    "print(json.dumps([sys.implementation.name, '%d.%d' % sys.version_info[:2],"
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED')), bool(u.find_spec('venv') and u.find_spec('ensurepip'))]))"
)


def _inspect(path: Path, spec: EngineSpec) -> tuple[Interpreter | None, str]:
    """Return the interpreter, or None and the reason why it is not suitable."""
    try:
        answer = subprocess.run([path, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"it does not run ({error})"
    try:
        implementation, minor, free_threaded, has_venv = json.loads(answer.stdout)
    except ValueError:
        return None, "it does not run"  # for example a version manager's shim for a version that is not selected
    if implementation != "cpython" or free_threaded:
        return None, f"it is a {'free-threaded ' if free_threaded else ''}{implementation}"
    if minor not in spec.locks:
        return None, f"it is Python {minor}"
    if not has_venv:
        return None, f"its venv module is missing (Debian, Ubuntu: apt install python{minor}-venv)"
    return Interpreter(path, minor), ""


def _candidates(spec: EngineSpec) -> Iterator[Path]:
    yield Path(sys.executable)
    for minor in sorted(spec.locks):
        on_path = shutil.which(f"python{minor}")
        if on_path:
            yield Path(on_path)
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
        yield from sorted(pyenv.glob(f"versions/{minor}.*/bin/python{minor}"))
        yield from sorted(uv.glob(f"cpython-{minor}.*/bin/python{minor}"))
