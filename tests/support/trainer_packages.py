"""Scripts that run in the environment that a trainer's own requirements resolve to, and folders of single packages.

Rows of tools/matrix.py are such environments: our requirements and the trainer's, resolved together (the locks in
tests/export/locks). A test names its row; it fails if a package cannot be installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from tools.matrix import environment

from tito_engines.spec import cache_dir

LOCKS = Path(__file__).parent.parent / "export" / "locks"
SCRIPTS = Path(__file__).parent.parent / "export" / "real"
_ROOT = Path(__file__).parent.parent.parent


@cache
def folder_of(lock: str) -> Path:
    """Return a folder with the packages of a lock alone; install them if necessary.

    Raises:
        AssertionError: pip failed; has its output.
    """
    pins = (LOCKS / f"{lock}.txt").read_text(encoding="utf-8")
    key = hashlib.sha256(f"{pins}{sys.version_info[:2]}".encode()).hexdigest()[:12]
    folder = cache_dir() / "trainers" / f"{lock}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / ".complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _install(lock, folder / "site-packages")
            (folder / ".complete").touch()
    return folder / "site-packages"  # Hypothesis ignores modules below a folder of this name


def _install(lock: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-input", "--ignore-requires-python"]
    index = os.environ.get("TITO_TORCH_INDEX")
    command += [*(["--extra-index-url", index] if index else []), "--target", str(folder)]
    done = subprocess.run([*command, "-r", str(LOCKS / f"{lock}.txt")], capture_output=True, text=True, timeout=1800)
    output = [line for line in done.stderr.splitlines() if "WARNING: Location" not in line]
    assert done.returncode == 0, f"pip could not install {lock}: " + "\n".join(output[-15:])


def run(script: str, row: str, *arguments: str, paths: Sequence[str | Path] = ()) -> str:
    """Run a script of tests/export/real in a row's environment, and return its output.

    Raises:
        AssertionError: The script failed; has its output.
        RuntimeError: A package cannot be installed.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "support").symlink_to(_ROOT / "tests" / "support")  # `tests` itself has a folder named vllm
        return _run(environment(row), script, [*paths, folder], arguments)


def _run(python: Path, script: str, paths: Sequence[str | Path], arguments: Sequence[str]) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    command = [str(python), "-W", "ignore", str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout
