"""An index of a file: the positions of its records, by ledger."""

from __future__ import annotations

import os
import uuid as uuid_module
from collections.abc import Iterable
from io import BytesIO

from tito_core.store.frames import PREAMBLE, Frame, Kind, Readable, frames, is_at

Records = tuple[list[Frame], ...]
"""The records of one ledger: a list per kind, in the order they were written."""


class Index:
    """The ledgers of a file, in the order they began, and the end of its last whole record.

    Attributes:
        end: Offset after the last whole record.
        last: The last whole record, or None.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._ledgers: dict[bytes, Records] = {}
        self.end = len(PREAMBLE)
        self.last: Frame | None = None

    def __len__(self) -> int:
        return len(self._ledgers)

    @property
    def uuids(self) -> list[str]:
        """UUIDs of the ledgers."""
        return [str(uuid_module.UUID(bytes=uuid)) for uuid in self._ledgers]

    def records(self, uuid: str) -> Records | None:
        """Return a ledger's records, or None if the file has no such ledger."""
        return self._ledgers.get(uuid_bytes(uuid))

    def count(self, uuid: str, kind: Kind) -> int:
        """Return the number of a ledger's records of one kind."""
        records = self.records(uuid)
        return len(records[kind]) if records else 0

    def scan(self, file: Readable) -> None:
        """Add the whole records that the file has after `end`."""
        self.add(frames(file, self.end, self._path))

    def lost_in(self, descriptor: int) -> str | None:
        """Return what another program did to the file, or None if it still holds the last record of this index."""
        last = self.last
        if last is None or (os.fstat(descriptor).st_size >= last.offset + last.length and is_at(descriptor, last)):
            return None
        return (
            f"another program truncated it or wrote over it: it has {os.fstat(descriptor).st_size} bytes, and the "
            f"record that ended at byte {last.offset + last.length} is gone"
        )

    def parsed(self, data: bytes) -> list[Frame]:
        """Return the frames of records that are about to be appended at `end`."""
        return [frame._replace(offset=frame.offset + self.end) for frame in frames(BytesIO(data), 0, self._path)]

    def add(self, added: Iterable[Frame]) -> None:
        """Add appended records. The file is not read again, since reading may fail where writing succeeded."""
        for frame in added:
            kind, uuid, offset, length = frame
            records = self._ledgers.get(uuid)
            if records is None:
                records = self._ledgers[uuid] = tuple([] for _ in range(max(Kind) + 1))
            records[kind].append(frame)
            self.end, self.last = offset + length, frame


def uuid_bytes(uuid: str) -> bytes:
    """Return a UUID's 16 bytes, or b"", which no file has, for a string that is not a canonical UUID."""
    try:
        parsed = uuid_module.UUID(uuid)
    except ValueError:
        return b""
    return parsed.bytes if str(parsed) == uuid else b""
