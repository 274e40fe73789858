"""Runs one command and sees to it that nothing of it is left: a script of its own, started by `supervised.popen`.

It reads an order (one line of JSON) on standard input, runs the command in a session of its own, and ends it with all
its descendants when the command ends, when it gets SIGTERM or SIGINT, and, unless the order says `detached`, when the
process that started it is gone, even by SIGKILL: then standard input is at its end, and the parent pid is another.

It is the subreaper of what it starts, so a descendant whose own parent died, or that made a session of its own, is
still found below it. It exits with the command's status, or 128 + the signal's number.
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
    """The first line of standard input, byte by byte: the rest is watched with `select`, so no buffer may take it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("supervisor: no order on standard input; this script is not for use by hand")
        line += byte
    order = json.loads(line)
    assert isinstance(order, dict)
    return order


class Supervisor:
    """The command, and whether it is time to end it."""

    def __init__(self, argv: list[str], env: dict[str, str], *, detached: bool, grace_s: float) -> None:
        self.grace_s = grace_s
        self.watch_parent = not detached
        self.parent = os.getppid()
        self.asked_to_stop = False
        self.status: int | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        # Should this process itself be killed, the kernel ends the command; its own children are then on their own.
        self.child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True, close_fds=True,
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked_to_stop = True

    def run(self) -> int:
        """Wait for the end, whoever brings it, and clear up. Returns the exit status."""
        while self.status is None and not self.asked_to_stop and not self._parent_is_gone():
            self._reap()
        if self.status is None:
            self._signal(self.child.pid, signal.SIGTERM)  # the engine ends its own workers in order, if it can
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
        """Collect what has ended, ours and what we inherited. True while there are children."""
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
        """Reap until no child is left (True) or the deadline has passed."""
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
        print(f"supervisor: the command could not be started: {error}", file=sys.stderr)
        return 127
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
