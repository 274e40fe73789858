"""Run a command that cannot outlive us, or one that is meant to."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from strands_tito.engines.errors import Cancelled

SCRIPT = Path(__file__).with_name("supervisor.py")

NOT_INHERITED = frozenset(
    {
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPYCACHEPREFIX",
        "VIRTUAL_ENV",
        "__PYVENV_LAUNCHER__",
    }
)
"""Variables that are meant for this process's Python: another environment's they would lead astray, or, without byte
code, make start anew from source each time."""


def environment(python: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, made fit for the Python of another virtual environment, with `extra` over it."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):  # engines call themselves while they warm up
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1", "localhost"]))
    env["PYTHONSAFEPATH"] = "1"  # a folder named like a package, where we happen to be, is not that package
    return env | dict(extra)


def popen(
    argv: Sequence[str], env: Mapping[str, str], out: IO[bytes] | int, *, detached: bool = False, grace_s: float = 5.0
) -> subprocess.Popen[bytes]:
    """Run `argv` under a supervisor (see `supervisor`), both outputs going to `out`.

    SIGTERM to the returned process, whose exit status is the command's, ends the command and all its descendants:
    asked first, and killed after `grace_s` seconds. Unless `detached`, so does the end of this process.
    """
    # -P keeps the script's own folder off sys.path, where our module names would hide others.
    process = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT)],
        stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    order = {"argv": list(argv), "env": dict(env), "detached": detached, "grace_s": grace_s}
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once; its status and output say why
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    if detached:
        process.stdin.close()
    return process


def run(argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None], cancel: threading.Event) -> int:
    """Run `argv` to its end, as a child that cannot outlive us, and return its exit status.

    `on_line` gets each line of its output as it comes, and an empty string for each half second without one.
    Raises Cancelled, after ending the command, when `cancel` is set.
    """
    process = popen(argv, env, subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    arrived: queue.Queue[bytes | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process.stdout, arrived), daemon=True)
    reader.start()
    try:
        for line in _lines(arrived):
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


def _read(stream: IO[bytes], arrived: queue.Queue[bytes | None]) -> None:
    for line in stream:
        arrived.put(line)
    arrived.put(None)


def _lines(arrived: queue.Queue[bytes | None]) -> Iterator[str]:
    while True:
        try:
            line = arrived.get(timeout=0.5)
        except queue.Empty:
            yield ""
            continue
        if line is None:
            return
        yield line.decode(errors="replace").rstrip()
