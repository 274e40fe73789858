"""Generations that an engine may be at work on: when the process ends before they do, the engine is told to stop."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tito_core.backend.bodies import ERROR_BYTES

WITHIN_S = 5.0
"""Longest time that the end of a process is held up by the aborts of what it leaves behind, in seconds."""


@dataclass(frozen=True, slots=True)
class Call:
    """One POST, to a server at an http(s) address or behind a Unix socket.

    Attributes:
        root: The server's http(s) address.
        socket: Path of its Unix socket, or None.
        path: Path of the call.
        body: JSON.
        headers: Authorization among them.
        tls: Its certificates are checked by this.
    """

    root: str
    socket: str | None
    path: str
    body: bytes
    headers: Mapping[str, str]
    tls: Callable[[], ssl.SSLContext]

    def post(self, timeout_s: float) -> None:
        """Send it, without an event loop: where this is needed there may be none, and no threads any more."""
        where = urlsplit(self.root)
        connection = self._connection(where.hostname or "localhost", where.port, where.scheme == "https", timeout_s)
        try:
            connection.request("POST", where.path + self.path, self.body, dict(self.headers))
            connection.getresponse().read(ERROR_BYTES)
        finally:
            connection.close()

    def _connection(self, host: str, port: int | None, tls: bool, timeout_s: float) -> http.client.HTTPConnection:
        if self.socket is not None:
            return _UnixConnection(self.socket, timeout_s)
        if tls:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self.tls())
        return http.client.HTTPConnection(host, port, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Outstanding:
    """The running ids of one backend. Threads and event loops may share it.

    Args:
        call: Gives the call that aborts an id.
    """

    def __init__(self, call: Callable[[str], Call]) -> None:
        self._call = call
        self._running: set[str] = set()
        _all.add(self)

    def add(self, running: str) -> None:
        """Count an id as running, until it is answered, known not to run, or aborted."""
        self._running.add(running)

    def discard(self, running: str) -> None:
        """Count it no longer."""
        self._running.discard(running)

    def abort_without_loop(self, running: str) -> None:
        """Abort what was lost together with its event loop. It does not wait, where a thread can still be had."""
        self._running.discard(running)
        call = self._call(running)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            threading.Thread(target=_post, args=(call, WITHIN_S), name="tito-abort").start()
            return
        _post(call, WITHIN_S)

    def abort_all(self, until: float) -> None:
        """Tell the engine to stop all of them, as far as time is left."""
        for running in list(self._running):
            if (left := until - time.monotonic()) <= 0:
                return
            _post(self._call(running), left)


def _post(call: Call, timeout_s: float) -> None:
    with contextlib.suppress(Exception):  # nobody is left whom a failure would say anything
        call.post(timeout_s)


_all: weakref.WeakSet[Outstanding] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    until = time.monotonic() + WITHIN_S
    for outstanding in list(_all):
        outstanding.abort_all(until)
