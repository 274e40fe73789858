"""Runs commands that get Ctrl-C at some moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ENTRY = "from strands_tito.__main__ import main; print('begun', flush=True); main()"
"""Runs `tito`. The line shows that Python has started; an earlier interrupt cannot be handled."""
NOISE = ("Traceback", "Exception ignored", "never retrieved", "never awaited", "Task was destroyed", "Fatal", "Error:")
"""Words that no interrupted command may print."""
WITHIN_S = 60.0
"""After how many seconds an interrupted command hangs: far more than its own limit and the slowest machine take."""


@dataclass(frozen=True)
class Ended:
    """A command that ended.

    Attributes:
        status: Its exit status, or minus the signal that ended it.
        out: Its standard output.
        errors: Its standard error.
        seconds: From its beginning, or from the interrupt, to its end.
    """

    status: int
    out: str
    errors: str
    seconds: float

    @property
    def noise(self) -> list[str]:
        """Words of `NOISE` in the output."""
        return [word for word in NOISE if word in self.out + self.errors]


def run(
    arguments: Sequence[str],
    cwd: Path,
    after_s: float | None = None,
    reached: Callable[[], bool] = lambda: True,
    number: int = signal.SIGINT,
) -> Ended:
    """Run `tito`, and interrupt it.

    Args:
        arguments: Those of the command.
        cwd: Where.
        after_s: Seconds to the interrupt from its beginning and what is `reached`; None leaves it alone.
        reached: Whether the command has come so far.
        number: The signal.

    Raises:
        AssertionError: It goes on after `WITHIN_S`; it is killed then.
    """
    with subprocess.Popen(
        [sys.executable, "-u", "-c", ENTRY, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "160", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
    ) as process:
        assert process.stdout is not None
        begun, since = process.stdout.readline(), time.monotonic()
        if after_s is not None:
            while process.poll() is None and not reached():
                time.sleep(0.001)
            try:
                process.wait(after_s)
            except subprocess.TimeoutExpired:
                since = time.monotonic()
                process.send_signal(number)
        try:
            out, errors = process.communicate(timeout=None if after_s is None else WITHIN_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # which prints where each thread is
            out, errors = process.communicate()
            raise AssertionError(f"It goes on {WITHIN_S:g} s after the interrupt: {out}{errors}") from None
    assert begun == "begun\n", errors
    return Ended(process.returncode, out, errors, time.monotonic() - since)
