"""Choose the Python interpreter for an engine's environment."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strands_tito.engines.errors import ANY_SERVER, CannotInstall
from strands_tito.engines.spec import EngineSpec

_PROBE = (
    "import json, sys, sysconfig, importlib.util as u;"
    "print(json.dumps([sys.implementation.name, '%d.%d' % sys.version_info[:2],"
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED')), bool(u.find_spec('venv') and u.find_spec('ensurepip'))]))"
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
    if requested is not None:
        found, why_not = _inspect(requested, spec)
        if found is None:
            raise CannotInstall(f"Cannot install {spec.title} with {requested}: {why_not}. {_requirements(spec)}")
        return found
    seen = []
    for path in _candidates(spec):
        found, why_not = _inspect(path, spec)
        if found is not None:
            return found
        seen.append(f"{path}: {why_not}")
    tried = "; ".join(seen[:4])
    raise CannotInstall(
        f"{spec.title} needs {_versions(spec)} for its environment; none was found ({tried}). "
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


def _versions(spec: EngineSpec) -> str:
    return "Python " + " or ".join(sorted(spec.locks))


def _requirements(spec: EngineSpec) -> str:
    return f"Use {_versions(spec)} with the venv module. {ANY_SERVER}"


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
