"""Ledgers in a file: MessagePack records, each framed by its length and checksum, appended one by one.

A file cut off in the middle of a record keeps every record before it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from tito_core.ledger.codec import SchemaError, from_record, to_record
from tito_core.ledger.ledger import Ledger

MAGIC = b"TITO\x00\x01\r\n"
_FRAME = struct.Struct("<II")
"""Length of the record in bytes, CRC-32 of it."""


def encode(ledger: Ledger, *, engine: bool = True) -> bytes:
    """Encode one ledger canonically: equal ledgers give equal bytes (law 13 compares them without `engine`)."""
    return msgspec.msgpack.encode(to_record(ledger, engine=engine), order="deterministic")


def append(path: str | os.PathLike[str], ledgers: Iterable[Ledger]) -> None:
    """Append ledgers to a file, making it if need be, and wait until they are on the disk."""
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another writer's half-written record is no torn tail
        _cut_torn_tail(file, path)
        for ledger in ledgers:
            record = encode(ledger)
            file.write(_FRAME.pack(len(record), zlib.crc32(record)) + record)
        file.flush()
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> list[Ledger]:
    """Read every whole ledger of a file; a torn tail is left out.

    Raises:
        SchemaError: Not such a file, damaged in the middle, or written by a newer version.
        LawViolationError: A ledger in it breaks a law.
    """
    with open(path, "rb") as file:
        _expect_magic(file, path)
        return [from_record(msgspec.msgpack.decode(record)) for record in _records(file, path)]


def _cut_torn_tail(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Leave the file at its end, after its last whole record, so that what is appended can be read."""
    file.seek(0)
    if len(start := file.read(len(MAGIC))) < len(MAGIC) and MAGIC.startswith(start):
        file.truncate(0)
        file.write(MAGIC)
        return
    file.seek(0)
    _expect_magic(file, path)
    whole = len(MAGIC) + sum(_FRAME.size + len(record) for record in _records(file, path))
    file.truncate(whole)
    file.seek(whole)


def _expect_magic(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    if file.read(len(MAGIC)) != MAGIC:
        raise SchemaError(f"{Path(path)} holds no rollouts of strands-tito: it does not start with {MAGIC!r}.")


def _records(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the whole records; what a crash left at the end, cut short or never written over zeros, ends them.

    Raises:
        SchemaError: A record in the middle is damaged. Nothing is cut away, since whole records follow it.
    """
    while len(header := file.read(_FRAME.size)) == _FRAME.size:
        start = file.tell()
        length, checksum = _FRAME.unpack(header)
        record = file.read(length)
        if len(record) < length or length == 0:
            return
        if zlib.crc32(record) != checksum:
            if not file.read(1):
                return
            raise SchemaError(
                f"{Path(path)} is damaged: the record at byte {start - _FRAME.size} does not match its checksum, and "
                "more follow it. Nothing was changed; restore the file from a copy."
            )
        yield record
