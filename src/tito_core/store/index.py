"""Where each record of a file lies, by the ledger that it belongs to."""

from __future__ import annotations

import os
import uuid as uuid_module
from collections.abc import Iterable
from io import BytesIO

from tito_core.store.frames import PREAMBLE, Frame, Kind, Readable, frames

Records = tuple[list[Frame], ...]
"""The records of one ledger by their kind, each in the order they were written."""


class Index:
    """What is known of a file: its ledgers, in the order they began, and where its last whole record ends.

    Attributes:
        end: Offset after the last whole record.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._ledgers: dict[bytes, Records] = {}
        self.end = len(PREAMBLE)

    def __len__(self) -> int:
        return len(self._ledgers)

    @property
    def uuids(self) -> list[str]:
        """Identities of the ledgers."""
        return [str(uuid_module.UUID(bytes=uuid)) for uuid in self._ledgers]

    def records(self, uuid: str) -> Records | None:
        """Return a ledger's records, or None for one that is not there."""
        return self._ledgers.get(packed(uuid))

    def count(self, uuid: str, kind: Kind) -> int:
        """Count a ledger's records of a kind."""
        found = self.records(uuid)
        return len(found[kind]) if found else 0

    def scan(self, file: Readable) -> None:
        """Take up the whole records that the file has beyond `end`, from whomever."""
        self.add(frames(file, self.end, self._path))

    def parsed(self, data: bytes) -> list[Frame]:
        """Read the frames of records that are about to be appended at `end`."""
        return [frame._replace(offset=frame.offset + self.end) for frame in frames(BytesIO(data), 0, self._path)]

    def add(self, added: Iterable[Frame]) -> None:
        """Take up records that were appended, without reading the disk again, which may fail where writing did not."""
        for frame in added:
            kind, uuid, offset, length = frame
            found = self._ledgers.get(uuid)
            if found is None:
                found = self._ledgers[uuid] = tuple([] for _ in range(max(Kind) + 1))
            found[kind].append(frame)
            self.end = offset + length


def packed(uuid: str) -> bytes:
    """Return an identity's 16 bytes; none for what is no identity, which no file has."""
    try:
        found = uuid_module.UUID(uuid)
    except ValueError:
        return b""
    return found.bytes if str(found) == uuid else b""
