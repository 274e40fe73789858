"""The file's framing: a magic number with the format's version, then records, each with its length and checksum.

A claimed length is compared with the file's size before any memory is taken (law 12). Reading a whole file, damaged or
hostile ones too, takes at most 256 bytes of memory for each byte of the file, and a mebibyte beyond that: an empty
MessagePack map is one byte, and a Python dict of its own. Nothing in the format is compressed.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

SCHEMA = 1
MAGIC = b"\x89TITO\r\n"
PREAMBLE = MAGIC + bytes([SCHEMA])
"""How a file begins: the magic number, then the version of the schema as one byte."""
_FACTS = struct.Struct("<IIB16s")
"""A record's head: length of its payload in bytes, CRC-32 of its payload, its kind, the UUID of its ledger."""
_HEAD = struct.Struct("<IIB16sI")
HEAD_BYTES = _HEAD.size
"""The head ends in a CRC-32 of its facts, so that a damaged length is not taken for a torn tail."""
BLOCK = 1 << 16
"""Bytes of a file that are read at once."""


class SchemaError(ValueError):
    """The record is no ledger, or a newer one than this version reads."""


class Readable(Protocol):
    """A file that is open to read, or bytes as one."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to an offset from the beginning, or from the end, and return it from the beginning."""

    def read(self, size: int, /) -> bytes:
        """Read at most so many bytes; none at the end."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Read into a buffer, and give how many bytes."""


class Kind(IntEnum):
    """What a record is."""

    HEADER = 1
    TURN = 2
    ANNOTATION = 3


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """Where a record lies.

    Attributes:
        kind: What it is.
        uuid: The ledger that it belongs to, 16 bytes.
        offset: Its payload's offset in the file.
        length: Its payload's length in bytes.
    """

    kind: Kind
    uuid: bytes
    offset: int
    length: int


def framed(kind: Kind, uuid: bytes, payload: bytes) -> bytes:
    """Put a record in its frame."""
    facts = _FACTS.pack(len(payload), zlib.crc32(payload), kind, uuid)
    return facts + zlib.crc32(facts).to_bytes(4, "little") + payload


def expect_preamble(file: Readable, path: str | os.PathLike[str]) -> None:
    """Read the file's beginning.

    Raises:
        SchemaError: It is no file of ledgers, or one of a newer version.
    """
    found = file.read(len(PREAMBLE))
    if not found.startswith(MAGIC) or len(found) < len(PREAMBLE):
        raise SchemaError(f"{Path(path)} holds no rollouts of strands-tito: it does not start with {MAGIC!r}.")
    if found[-1] != SCHEMA:
        raise SchemaError(
            f"{Path(path)} has schema {found[-1]}, this version of strands-tito reads {SCHEMA}: "
            "upgrade strands-tito to read it."
        )


def frames(file: Readable, start: int, path: str | os.PathLike[str]) -> Iterator[Frame]:
    """Yield the whole records from an offset on.

    What a crash left at the end, cut short or zeros that were never written over, ends them.

    Raises:
        SchemaError: A record is damaged. Nothing is cut away, since it was whole once.
    """
    window = _Window(file, start)
    while window.hold(HEAD_BYTES):
        at, block = window.at, window.view
        length, checksum, kind, uuid, head_checksum = _HEAD.unpack_from(block, at)
        if zlib.crc32(block[at : at + _FACTS.size]) != head_checksum:
            if not window.only_zeros_after(HEAD_BYTES):  # a head cut short, and zeros, are torn too
                raise _damaged(path, window.offset)
            return
        size = HEAD_BYTES + length
        if window.stop - at < size:
            if not window.hold(size):
                return
            at, block = window.at, window.view
        if zlib.crc32(block[at + HEAD_BYTES : at + size]) != checksum:
            was_whole = block[at + size - 1] != 0  # what a power cut left unwritten is zeros up to the end
            if was_whole or not window.only_zeros_after(size):
                raise _damaged(path, window.offset)
            return
        if kind not in _KINDS:
            raise SchemaError(
                f"{Path(path)} holds a record of unknown kind {kind} at byte {window.offset}: upgrade strands-tito to "
                "read it."
            )
        yield Frame(_KINDS[kind], uuid, window.offset + HEAD_BYTES, length)
        window.at = at + size


class _Window:
    """What is held of a file that is read from `start` to its end: one buffer, into which the file is read.

    Attributes:
        view: The buffer.
        at: Where in it the next record begins.
        stop: Where in it what was read ends.
    """

    def __init__(self, file: Readable, start: int) -> None:
        file.seek(start)
        self._file = file
        self._start = start  # offset in the file of the buffer's first byte
        self.view = memoryview(bytearray(BLOCK))
        self.at = self.stop = 0

    @property
    def offset(self) -> int:
        """Where in the file the next record begins."""
        return self._start + self.at

    def hold(self, size: int) -> bool:
        """Hold so many bytes of the next record; False when the file ends before."""
        if self.stop - self.at >= size:
            return True
        if size > len(self.view) and size > self._left():
            return False
        tail = self.view[self.at : self.stop]
        view = self.view if size <= len(self.view) else memoryview(bytearray(size + BLOCK))
        view[: len(tail)] = tail
        self.view, self._start, self.at, self.stop = view, self._start + self.at, 0, len(tail)
        while self.stop < size:
            count = self._file.readinto(view[self.stop :])
            if not count:
                return False
            self.stop += count
        return True

    def only_zeros_after(self, size: int) -> bool:
        """Return whether nothing but zeros comes from `size` bytes into the next record to the end of the file."""
        chunk = bytes(self.view[self.at + size : self.stop])
        while chunk.count(0) == len(chunk):
            if not (chunk := self._file.read(1 << 20)):
                return True
        return False

    def _left(self) -> int:
        """Count the file's bytes from the next record on."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(self._start + self.stop)
        return size - self.offset


def _damaged(path: str | os.PathLike[str], at: int) -> SchemaError:
    return SchemaError(
        f"{Path(path)} is damaged: the record at byte {at} does not match its checksum. Nothing was changed; restore "
        "the file from a copy."
    )
