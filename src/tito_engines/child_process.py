"""Run a command so that none of its processes outlives this one: under the supervisor of supervisor.py."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from tito_core.ledger.errors import how_to_install
from tito_engines.errors import ANY_SERVER, Cancelled, CannotInstall

SCRIPT = Path(__file__).with_name("supervisor.py")
NOT_INHERITED = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "VIRTUAL_ENV"),
    "__PYVENV_LAUNCHER__",
)
"""Variables of this process's Python that would break or slow down the Python of another environment."""


def check_psutil() -> None:
    """Check that psutil is installed, which only those who run engines need.

    Raises:
        CannotInstall: It is not.
    """
    if find_spec("psutil") is None:
        raise CannotInstall(
            f"Engines on this machine need psutil, which is not installed: {how_to_install('engines')}. {ANY_SERVER}"
        )


def environment(python: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment variables, adapted to another environment's Python and updated by `extra`."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):  # engines send requests to themselves while they start
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1", "localhost"]))
    env["PYTHONSAFEPATH"] = "1"  # so that a folder in the working directory does not shadow a package
    return env | dict(extra)


def run(argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None], cancel: threading.Event) -> int:
    """Run `argv` to its end and return its exit status. The command ends with this process.

    Args:
        argv: The command.
        env: Its environment variables.
        on_line: Called with each line of output, and with "" after each half second without output.
        cancel: Set it from another thread to end the command.

    Raises:
        Cancelled: `cancel` was set.
    """
    process = popen(argv, env, subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    output: queue.Queue[bytes | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, output), daemon=True)
    reader.start()
    try:
        for line in _lines(output):
            if cancel.is_set():
                raise Cancelled(f"`{' '.join(argv[:4])} ...` was cancelled.")
            on_line(line)
        return process.wait()
    finally:
        process.terminate()
        process.wait()
        reader.join()
        process.stdin.close()
        process.stdout.close()


def popen(
    argv: Sequence[str], env: Mapping[str, str], out: IO[bytes] | int, *, detached: bool = False, grace_s: float = 5.0
) -> subprocess.Popen[bytes]:
    """Run `argv` under a supervisor (see supervisor.py); standard output and error go to `out`.

    The returned process is the supervisor; its exit status is the command's. SIGTERM to it ends the command and all its
    descendants: SIGTERM first, SIGKILL after `grace_s` seconds. Unless `detached`, the end of this process does too.
    """
    check_psutil()
    # -P keeps the script's folder off sys.path, where our module names would shadow others.
    process = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT)],
        stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    order = {"argv": list(argv), "env": dict(env), "detached": detached, "grace_s": grace_s}
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the supervisor ended at once; its status and output say why
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    if detached:
        process.stdin.close()
    return process


def _read(stream: IO[bytes], output: queue.Queue[bytes | None]) -> None:
    for line in stream:
        output.put(line)
    output.put(None)


def _lines(output: queue.Queue[bytes | None]) -> Iterator[str]:
    while True:
        try:
            line = output.get(timeout=0.5)
        except queue.Empty:
            yield ""
            continue
        if line is None:
            return
        yield line.decode(errors="replace").rstrip()
