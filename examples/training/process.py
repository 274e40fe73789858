"""Run the learner as a process in the engine's environment, which already has torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

SCRIPT = Path(__file__).with_name("learner.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # SGLang's environment has a stand-in for triton
    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must not take CPU time from the engine
}


class LearnerProcess:
    """A running `learner.py`. Its standard error goes to `log`."""

    def __init__(self, python: Path, model: Path, settings: dict[str, Any], log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-P", str(SCRIPT), str(model), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **ENVIRONMENT},
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
