"""Run the learner as a process in the engine's environment, which already has torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from tito_engines import InstallFailed
from tito_engines.cache import build_once
from tito_engines.spec import cache_dir

SCRIPT = Path(__file__).with_name("learner.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # SGLang's environment has a stand-in for triton
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must not take CPU time from the engine
}
PEFT = ("peft==0.21.2", "accelerate==1.15.0")
"""What an engine's environment lacks to train a LoRA adapter; it has all that these need."""


def peft_folder(python: Path) -> Path:
    """Return a folder with PEFT for the interpreter's path, so that the engine's environment stays as its lock says.

    Raises:
        InstallFailed: pip could not install it.
    """

    def build(folder: Path) -> None:
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PEFT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise InstallFailed(f"pip could not install {' '.join(PEFT)} (status {done.returncode}): {done.stderr}")

    return build_once(cache_dir() / "-".join(PEFT), build, watched="*/__init__.py")


class LearnerProcess:
    """A running `learner.py`, whose imports are also looked for in `path`. Its standard error goes to `log`."""

    def __init__(self, python: Path, model: Path, settings: dict[str, Any], log: Path, path: Path | str = "") -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-P", str(SCRIPT), str(model), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(path)},
            )

    def ask(self, do: str, **order: str) -> dict[str, Any]:
        """Send one order and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(f"The learner ended with status {self._process.wait()} during {do!r}:\n{last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> LearnerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()
