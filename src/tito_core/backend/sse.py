"""Server-sent events, as engines stream: the data of each event, out of bytes that come cut anywhere."""

from __future__ import annotations

DONE = b"[DONE]"
"""What both engines send as the last event's data."""


class EventReader:
    """Cuts a body into events. Keeps only what is not yet a whole event.

    Attributes:
        done: Whether the last event, `[DONE]`, has come.
    """

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; give the data of each event that they complete. What comes after `[DONE]` is ignored."""
        found: list[bytes] = []
        # A line may end in \r\n, and the piece between the two: then \r stays in the rest until \n is there.
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # a blank line between events, a comment that keeps the connection, a field of no use here
            data = line[5:].strip()
            if data == DONE:
                self.done = True
            elif not self.done:
                found.append(data)
        return found
