"""Forks processes of `tito collect` that tests kill.

This script imports everything once. For each line of standard input, `{"argv": [...], "cwd": ..., "log": ...}`, it
forks a process and answers with its id. For a number it waits for that process and answers with its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import strands  # noqa: F401  # imported once, before the forks

import tito_vllm.backend  # noqa: F401
from strands_tito import cli


def run(order: dict[str, object]) -> None:
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(str(order["cwd"]))
    sys.argv = ["tito", *order["argv"]]  # type: ignore[misc]
    cli.main()


def main() -> None:
    # Background processes of a shell ignore SIGINT, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, int):
            print(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            status = 1
            try:
                run(order)
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
