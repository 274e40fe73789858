"""Processes of `tito collect` that somebody kills.

This script has everything imported and forks one for each line on its standard input, `{"argv": [...], "cwd": ...,
"log": ...}`, and answers with its process id; for a number it answers with how that process ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import strands  # noqa: F401  # imported once, for all that are forked

import tito_vllm.backend  # noqa: F401
from strands_tito import cli


def run(asked: dict[str, object]) -> None:
    log = os.open(str(asked["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(str(asked["cwd"]))
    sys.argv = ["tito", *asked["argv"]]  # type: ignore[misc]
    cli.main()


def main() -> None:
    # A shell has what it starts in the background ignore this one, and so do all that come from there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            status = 1
            try:
                run(asked)
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
