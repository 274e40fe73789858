"""A server of raw bytes on loopback: it reads each request's head, sends fixed bytes and ends the connection."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

Ends = Literal["close", "reset", "hold"]
"""How a connection ends after the bytes were sent; "hold" waits until the client closes it."""


class RawServer:
    """Serves one connection after another, in a thread.

    Args:
        says: The bytes of each answer, or pieces of them; the last may find no reader.
        ends: See `Ends`.
        tls: The context to speak TLS by.
        port: Where to listen; any free port when 0.
        reads: Bytes that end a request's head; None answers the first bytes that come.

    Attributes:
        heads: The requests' heads.
        sent: Bytes of answers that were sent.
    """

    def __init__(
        self,
        says: bytes | Iterable[bytes],
        *,
        ends: Ends = "close",
        tls: ssl.SSLContext | None = None,
        port: int = 0,
        reads: bytes | None = b"\r\n\r\n",
    ) -> None:
        self.heads: list[bytes] = []
        self.sent = 0
        self._says, self._ends, self._tls, self._reads = says, ends, tls, reads
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            with connection, contextlib.suppress(OSError):
                if self._tls is None:
                    self._talk(connection)
                    continue
                with self._tls.wrap_socket(connection, server_side=True) as wrapped:
                    self._talk(wrapped)

    def _talk(self, connection: socket.socket) -> None:
        head = b""
        while True:
            piece = connection.recv(65536)
            if not piece:
                return
            head += piece
            if self._reads is None or self._reads in head:
                break
        self.heads.append(head)
        for answer in [self._says] if isinstance(self._says, bytes) else self._says:
            connection.sendall(answer)
            self.sent += len(answer)
        if self._ends == "hold":
            while connection.recv(65536):
                pass
        elif self._ends == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def full_backlog() -> Iterator[str]:
    """A listening socket with a full backlog: the kernel drops new connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        knocking = []
        try:
            for _ in range(4):
                knocking.append(socket.socket())
                knocking[-1].setblocking(False)
                knocking[-1].connect_ex(listener.getsockname())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for client in knocking:
                client.close()
