"""Server-sent events, as engines stream: the data of each event, out of bytes that come cut anywhere."""

from __future__ import annotations

from tito_core.backend.bodies import AnswerSize, BodyTooLargeError

DONE = b"[DONE]"
"""What both engines send as the last event's data."""


class EventReader:
    """Cuts a body into events. Keeps only what is not yet a whole event.

    Args:
        size: Most bytes of an event, and of the stream.

    Attributes:
        done: Whether the last event, `[DONE]`, has come.
    """

    __slots__ = ("_length", "_read", "_rest", "_size", "done")

    def __init__(self, size: AnswerSize) -> None:
        self._size = size
        self._read = 0
        self._rest: list[bytes] = []
        self._length = 0
        self.done = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; return the data of each event that they complete. What follows `[DONE]` is ignored.

        Raises:
            BodyTooLargeError: A line, or the stream, is longer than it may be.
        """
        self._read += len(piece)
        if self._read > self._size.stream:
            raise BodyTooLargeError(self._size.stream)
        # A line may end in \r\n, and the piece between the two: then \r stays in the rest until \n is there.
        lines = piece.split(b"\n")
        self._length += len(lines[0])
        if self._length > self._size.body:
            raise BodyTooLargeError(self._size.body)
        self._rest.append(lines[0])
        if len(lines) == 1:
            return []
        lines[0] = b"".join(self._rest)
        self._rest = [lines.pop()]
        self._length = len(self._rest[0])
        return self._data(lines)

    def _data(self, lines: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # a blank line between events, a comment that keeps the connection, a field of no use here
            data = line[5:].strip()
            if data == DONE:
                self.done = True
            elif not self.done:
                found.append(data)
        return found
