"""Script that runs one command and leaves none of its processes behind; started by `child_process.popen`.

It reads an order (one line of JSON) from standard input and runs the command in a new session. It ends the command and
all its descendants when the command ends, when it receives SIGTERM or SIGINT, and, unless the order says `detached`,
when the process that started it is gone, even by SIGKILL: standard input is then at its end and the parent pid changed.

It is the subreaper of the command's processes, so that it finds descendants whose parent died or that started a session
of their own. Its exit status is the command's, or 128 + the signal's number.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36  # both from linux/prctl.h
POLL_S = 0.2
AFTER_KILL_S = 5.0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _read_order() -> dict[str, Any]:
    """Read the first line of standard input byte by byte: `select` watches the rest, so it must not be buffered."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("supervisor: no order on standard input; this script is started by tito_engines")
        line += byte
    order = json.loads(line)
    assert isinstance(order, dict)
    return order


class Supervisor:
    """The command and the conditions that end it."""

    def __init__(self, argv: list[str], env: dict[str, str], *, detached: bool, grace_s: float) -> None:
        self.grace_s = grace_s
        self.watch_parent = not detached
        self.parent = os.getppid()
        self.stop_requested = False
        self.status: int | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        # If this process is killed, the kernel ends the command, but not the command's children.
        self.child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True,
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop_requested = True

    def run(self) -> int:
        """Wait for the end of the command, stop its descendants and return the exit status."""
        while self.status is None and not self.stop_requested and not self._parent_is_gone():
            self._reap()
        if self.status is not None:
            how = f"signal {self.status - 128}" if self.status > 128 else f"status {self.status}"
            print(f"supervisor: the server ended by itself, with {how}", file=sys.stderr, flush=True)
        else:
            self._signal(self.child.pid, signal.SIGTERM)  # lets the engine stop its own workers in order
            self._reap_until(time.monotonic() + self.grace_s)
        self._kill_rest()
        return 0 if self.status is None else self.status

    def _parent_is_gone(self) -> bool:
        if not self.watch_parent:
            time.sleep(POLL_S)
            return False
        readable, _, _ = select.select([0], [], [], POLL_S)
        return os.getppid() != self.parent or (bool(readable) and os.read(0, 4096) == b"")

    def _reap(self) -> bool:
        """Reap ended children, including inherited ones. Return True while there are children."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child.pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = self.child.returncode = code if code >= 0 else 128 - code

    def _reap_until(self, deadline: float) -> bool:
        """Reap until no child is left (True) or the deadline has passed (False)."""
        while self._reap():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _kill_rest(self) -> None:
        deadline = time.monotonic() + AFTER_KILL_S
        while self._reap() and time.monotonic() < deadline:
            for process in psutil.Process().children(recursive=True):
                self._signal(process.pid, signal.SIGKILL)
            time.sleep(0.05)

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> int:
    """Carry out the order on standard input."""
    order = _read_order()
    try:
        supervisor = Supervisor(**order)
    except OSError as error:
        print(f"supervisor: could not start the command: {error}", file=sys.stderr)
        return 127
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
