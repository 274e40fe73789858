"""The frames of a file of ledgers: checksummed records one after the other, found again after any crash.

A file is a preamble and records. A record is a head (length, checksum, kind, ledger) and a payload. What a crash can
leave, a torn tail, is skipped; what it cannot leave is damage.

A record's length is compared with the file's size before memory is allocated (law 12). Reading any file, even a damaged
or hostile one, takes at most 256 bytes of memory per byte of the file, plus one MiB: an empty MessagePack map is one
byte, but a whole Python dict. Nothing in the format is compressed.
"""

from __future__ import annotations

import os
import re
import struct
import uuid as uuid_module
import zlib
from collections.abc import Iterator
from enum import IntEnum
from io import BufferedReader, BytesIO, FileIO
from pathlib import Path
from typing import Any, NamedTuple

from tito_core.ledger.errors import TITOError

SCHEMA = 2
"""Schema 1 has no `agent` of a turn. Both are read; a file of schema 1 becomes one of schema 2 when it is continued."""
MAGIC = b"\x89TITO\r\n"
PREAMBLE = MAGIC + bytes([SCHEMA])
"""The start of a file: the magic number, then the schema version as one byte."""
_FACTS = struct.Struct("<IIB16s")
"""The first part of a record's head: payload length in bytes, CRC-32 of the payload, kind, UUID of the ledger."""
_HEAD = struct.Struct("<IIB16sI")
HEAD_BYTES = _HEAD.size
"""Size of a head. It ends with a CRC-32 of its first part, so that a damaged length is not mistaken for a torn tail."""
_KIND_AT = 8
"""Offset of the kind in a head."""
BLOCK = 1 << 16
"""Number of bytes that are read at once."""
_DISK_BLOCK = 4096
"""Number of bytes that a power cut leaves written or zero together: the block of most file systems."""


class SchemaError(TITOError, ValueError):
    """A file or record is not a ledger, is damaged, contradicts the ledger, or has a newer schema."""


class Kind(IntEnum):
    """The kind of a record."""

    HEADER = 1
    TURN = 2
    ANNOTATION = 3
    IMAGE = 4
    END = 5
    """A rollout is finished. The payload is its writer's, such as the facts that a list of rollouts shows."""


_KINDS = {int(kind): kind for kind in Kind}
_ANY_KIND = re.compile(b"[" + bytes(_KINDS) + b"]")


class Frame(NamedTuple):
    """The position of a record.

    Attributes:
        kind: Its kind.
        uuid: UUID of its ledger, 16 bytes.
        offset: Offset of its payload in the file.
        length: Length of its payload in bytes.
    """

    kind: Kind
    uuid: bytes
    offset: int
    length: int


Records = tuple[list[Frame], ...]
"""The records of one ledger: a list per kind, in the order they were written."""
Readable = BufferedReader | BytesIO | FileIO
"""A binary file that is open for reading."""


def framed(kind: Kind, uuid: bytes, payload: bytes) -> bytes:
    """Return a record: head and payload."""
    facts = _FACTS.pack(len(payload), zlib.crc32(payload), kind, uuid)
    return facts + zlib.crc32(facts).to_bytes(4, "little") + payload


def frames(file: Readable, start: int, path: str | os.PathLike[str]) -> Iterator[Frame]:
    """Yield the whole records from an offset on.

    Stop at a torn tail, which a crash leaves: the beginning of one record, up to the end of the file or followed by
    zeros that were never overwritten.

    Raises:
        SchemaError: A record is damaged, or of an unknown kind. What a crash cannot leave is damage.
    """
    window = _Window(file, start)
    while window.hold(HEAD_BYTES):
        at, block = window.at, window.view
        length, checksum, kind, uuid, head_checksum = _HEAD.unpack_from(block, at)
        if zlib.crc32(block[at : at + _FACTS.size]) != head_checksum:
            was_whole = block[at + HEAD_BYTES - 1] != 0  # a torn head has zeros up to its end
            if was_whole or not window.only_zeros_after(HEAD_BYTES):
                raise _damaged(path, window.offset)
            return
        if kind not in _KINDS:
            raise SchemaError(
                f"{Path(path)} holds a record of unknown kind {kind} at byte {window.offset}: upgrade strands-tito to "
                "read it."
            )
        size = HEAD_BYTES + length
        if window.stop - at < size:
            if not window.hold(size):
                if window.has_head_after(HEAD_BYTES):  # bytes are missing in the middle of the file
                    raise _damaged(path, window.offset)
                return
            at, block = window.at, window.view
        if zlib.crc32(block[at + HEAD_BYTES : at + size]) != checksum:
            was_whole = block[at + size - 1] != 0  # a power cut leaves zeros up to the end of the file
            if was_whole or not window.only_zeros_after(window.least_zeros(size)):
                raise _damaged(path, window.offset)
            return
        yield Frame(_KINDS[kind], uuid, window.offset + HEAD_BYTES, length)
        window.at = at + size
    tail = bytes(window.view[window.at : window.stop])
    if any(tail[_KIND_AT:]) and tail[_KIND_AT] not in _KINDS:  # no beginning of a head, such as a line of text
        raise _damaged(path, window.offset)


def expect_preamble(file: Readable, path: str | os.PathLike[str]) -> int:
    """Read and check the preamble, and return the file's schema.

    Raises:
        SchemaError: The file is not a rollout file, or has a newer schema.
    """
    preamble = file.read(len(PREAMBLE))
    if not preamble.startswith(MAGIC) or len(preamble) < len(PREAMBLE):
        raise SchemaError(f"{Path(path)} is not a strands-tito rollout file: it does not start with {MAGIC!r}.")
    expect_known(preamble[-1], str(Path(path)))
    return preamble[-1]


def expect_known(schema: Any, what: str) -> None:
    """Check the schema of a file or a record.

    Raises:
        SchemaError: It is newer than this version reads.
    """
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise SchemaError(
            f"{what} has schema {schema}, this version of strands-tito reads up to {SCHEMA}: upgrade strands-tito to "
            "read it."
        )


def is_at(descriptor: int, frame: Frame) -> bool:
    """Return whether a file still has the head of a record where it was read or written."""
    head = os.pread(descriptor, HEAD_BYTES, frame.offset - HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return False
    length, _, kind, uuid, checksum = _HEAD.unpack(head)
    return zlib.crc32(head[: _FACTS.size]) == checksum and (kind, uuid, length) == (
        frame.kind,
        frame.uuid,
        frame.length,
    )


def uuid_bytes(uuid: str) -> bytes:
    """Return a UUID's 16 bytes, or b"", which no file has, for a string that is not a canonical UUID."""
    try:
        parsed = uuid_module.UUID(uuid)
    except ValueError:
        return b""
    return parsed.bytes if str(parsed) == uuid else b""


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
        for frame in frames(file, self.end, self._path):
            self.add(frame)

    def lost_in(self, descriptor: int) -> str | None:
        """Return what another program did to the file, or None if it still holds the last record of this index."""
        last = self.last
        if last is None or (os.fstat(descriptor).st_size >= last.offset + last.length and is_at(descriptor, last)):
            return None
        return (
            f"another program truncated it or wrote over it: it has {os.fstat(descriptor).st_size} bytes, and the "
            f"record that ended at byte {last.offset + last.length} is gone"
        )

    def add(self, frame: Frame) -> None:
        """Add an appended record. The file is not read again, since reading may fail where writing succeeded."""
        kind, uuid, offset, length = frame
        records = self._ledgers.get(uuid)
        if records is None:
            records = self._ledgers[uuid] = tuple([] for _ in range(max(Kind) + 1))
        records[kind].append(frame)
        self.end, self.last = offset + length, frame


class _Window:
    """A buffer that moves over a file, from `start` to the end that the file has now.

    What another process appends meanwhile is not read: a record that is half there and one after it would be damage.

    Attributes:
        view: The buffer.
        at: Position of the next record in the buffer.
        stop: End of the bytes that were read into the buffer.
    """

    def __init__(self, file: Readable, start: int) -> None:
        self._file = file
        self._start = start  # the buffer's offset in the file
        self._end = file.seek(0, os.SEEK_END)
        self.view = memoryview(bytearray(BLOCK))
        self.at = self.stop = 0

    @property
    def offset(self) -> int:
        """Offset of the next record in the file."""
        return self._start + self.at

    def hold(self, size: int) -> bool:
        """Read until the buffer holds `size` bytes from the next record on. Return False if the file ends before."""
        if self.stop - self.at >= size:
            return True
        if size > len(self.view) and size > self._left():
            return False
        tail = self.view[self.at : self.stop]
        view = self.view if size <= len(self.view) else memoryview(bytearray(size + BLOCK))
        view[: len(tail)] = tail
        self.view, self._start, self.at, self.stop = view, self._start + self.at, 0, len(tail)
        while self.stop < size:
            count = self._fill(view[self.stop :], self._start + self.stop)
            if not count:
                return False
            self.stop += count
        return True

    def least_zeros(self, size: int) -> int:
        """Return how far after the next record's start zeros must begin if they are those of a power cut.

        That is at its end, or, where the file ends there too, at the start of its last disk block: blocks are written
        whole, and a record may end with zeros of its own, as a reward of 1.0 does.
        """
        if self._left() > size:
            return size
        return max(0, (self.offset + size - 1) // _DISK_BLOCK * _DISK_BLOCK - self.offset)

    def only_zeros_after(self, size: int) -> bool:
        """Return whether the file has only zeros from `size` bytes after the next record's start to its end."""
        chunk, after = bytes(self.view[self.at + size : self.stop]), self._start + self.stop
        while chunk.count(0) == len(chunk):
            if not (chunk := self._read(after, 1 << 20)):
                return True
            after += len(chunk)
        return False

    def has_head_after(self, size: int) -> bool:
        """Return whether a whole head begins `size` bytes or more after the next record's start."""
        after = self.offset + size
        block = self._read(after, BLOCK)
        after += len(block)
        while len(block) >= HEAD_BYTES:
            for found in _ANY_KIND.finditer(block, _KIND_AT, len(block) - HEAD_BYTES + _KIND_AT + 1):
                start = found.start() - _KIND_AT
                checksum = int.from_bytes(block[start + _FACTS.size : start + HEAD_BYTES], "little")
                if zlib.crc32(block[start : start + _FACTS.size]) == checksum:
                    return True
            more = self._read(after, BLOCK)
            if not more:
                return False
            after += len(more)
            block = block[-(HEAD_BYTES - 1) :] + more
        return False

    def _left(self) -> int:
        """Return the number of bytes of the file from the next record on."""
        return self._end - self.offset

    def _fill(self, view: memoryview, offset: int) -> int:
        """Read from an offset into a buffer. A file's own position is not used: forked processes share it."""
        view = view[: max(0, self._end - offset)]
        if isinstance(self._file, BytesIO):
            self._file.seek(offset)
            return self._file.readinto(view)
        return os.preadv(self._file.fileno(), [view], offset)

    def _read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from an offset on; none at the end of the file."""
        view = memoryview(bytearray(size))
        return bytes(view[: self._fill(view, offset)])


def _damaged(path: str | os.PathLike[str], offset: int) -> SchemaError:
    return SchemaError(
        f"{Path(path)} is damaged: the record at byte {offset} does not match its checksum. Nothing was changed; "
        "restore the file from a copy."
    )
