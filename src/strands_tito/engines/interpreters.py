"""Which Python an engine's environment is made with."""

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

_ASK = (
    "import json, sys, sysconfig, importlib.util as u;"
    "print(json.dumps([sys.implementation.name, '%d.%d' % sys.version_info[:2],"
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED')), bool(u.find_spec('venv') and u.find_spec('ensurepip'))]))"
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that can make the environment."""

    path: Path
    minor: str
    """`"3.11"`."""


def choose(spec: EngineSpec, wanted: Path | None = None) -> Interpreter:
    """The Python for this engine: `wanted`, else the running one, else one on the PATH, under pyenv or under uv.

    Raises CannotInstall, which says what this machine lacks.
    """
    check_machine(spec)
    if wanted is not None:
        found, why_not = _look_at(wanted, spec)
        if found is None:
            raise CannotInstall(f"{spec.title} cannot be installed with {wanted}: {why_not}. {_needs(spec)}")
        return found
    seen = []
    for path in _candidates(spec):
        found, why_not = _look_at(path, spec)
        if found is not None:
            return found
        seen.append(f"{path}: {why_not}")
    tried = "; ".join(seen[:4])
    raise CannotInstall(
        f"{spec.title} needs {_versions(spec)} for its own environment, and none was found ({tried}). "
        f"Install one, or name it with --python. {ANY_SERVER}"
    )


def check_machine(spec: EngineSpec) -> None:
    """Raise CannotInstall unless the engine has builds for this system, processor and C library."""
    system, machine = platform.system(), platform.machine()
    runs_on = " or ".join(f"{s} on {m}" for s, m in sorted(spec.systems))
    here = f"{system} on {machine}"
    if (system, machine) in spec.systems:
        if system != "Linux" or platform.libc_ver()[0] == "glibc":
            return
        here += " without glibc"
    raise CannotInstall(f"{spec.title} is installed here for {runs_on}, and this is {here}. {ANY_SERVER}")


def _versions(spec: EngineSpec) -> str:
    return "Python " + ", ".join(sorted(spec.locks))


def _needs(spec: EngineSpec) -> str:
    return f"It needs {_versions(spec)} with the venv module. {ANY_SERVER}"


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


def _look_at(path: Path, spec: EngineSpec) -> tuple[Interpreter | None, str]:
    """The interpreter, or None and why it will not do."""
    try:
        answer = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"it does not run ({error})"
    try:
        implementation, minor, free_threaded, has_venv = json.loads(answer.stdout)
    except ValueError:
        return None, "it does not run"  # a version manager's shim for a version that is not selected, for one
    if implementation != "cpython" or free_threaded:
        return None, f"it is a {'free-threaded ' if free_threaded else ''}{implementation}"
    if minor not in spec.locks:
        return None, f"it is Python {minor}"
    if not has_venv:
        return None, f"its venv module is missing (on Debian and Ubuntu: apt install python{minor}-venv)"
    return Interpreter(path, minor), ""
