"""Start a command that cannot outlive us, or one that is meant to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SCRIPT = Path(__file__).with_name("supervisor.py")

NOT_INHERITED = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"})
"""Variables that belong to this process's Python and would lead another environment's astray."""


def environment(python: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, made fit for the Python of another virtual environment, with `extra` over it."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):  # engines call themselves while they warm up
        env[name] = ",".join(filter(None, [env.get(name), "127.0.0.1", "localhost"]))
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
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    if detached:
        process.stdin.close()
    return process
