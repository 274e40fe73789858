"""The file's framing: a magic number with the format's version, then records, each with its length and checksum."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from tito_core.store.records import SCHEMA, SchemaError

MAGIC = b"\x89TITO\r\n"
PREAMBLE = MAGIC + bytes([SCHEMA])
"""How a file begins: the magic number, then the version of the schema as one byte."""
_FACTS = struct.Struct("<IIB16s")
"""A record's head: length of its payload in bytes, CRC-32 of its payload, its kind, the UUID of its ledger."""
HEAD_BYTES = _FACTS.size + 4
"""The head ends in a CRC-32 of itself, so that a damaged length is not taken for a torn tail."""


class Kind(IntEnum):
    """What a record is."""

    HEADER = 1
    TURN = 2
    ANNOTATION = 3


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Frame:
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

    @property
    def stop(self) -> int:
        """One past its last byte in the file."""
        return self.offset + self.length


def framed(kind: Kind, uuid: bytes, payload: bytes) -> bytes:
    """Put a record in its frame."""
    facts = _FACTS.pack(len(payload), zlib.crc32(payload), kind, uuid)
    return facts + zlib.crc32(facts).to_bytes(4, "little") + payload


def expect_preamble(file: BinaryIO, path: str | os.PathLike[str]) -> None:
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


def frames(file: BinaryIO, start: int, path: str | os.PathLike[str]) -> Iterator[Frame]:
    """Yield the whole records from an offset on.

    What a crash left at the end, cut short or zeros that were never written over, ends them.

    Raises:
        SchemaError: A record is damaged. Nothing is cut away, since it was whole once.
    """
    file.seek(start)
    while len(head := file.read(HEAD_BYTES)) == HEAD_BYTES:
        at = file.tell() - HEAD_BYTES
        facts = head[: _FACTS.size]
        length, checksum, kind, uuid = _FACTS.unpack(facts)
        if zlib.crc32(facts) != int.from_bytes(head[_FACTS.size :], "little"):
            if not any(head) and _only_zeros(file):
                return
            raise _damaged(path, at)
        payload = file.read(length)
        if len(payload) < length:
            return
        if zlib.crc32(payload) != checksum:
            if _only_zeros(file):
                return
            raise _damaged(path, at)
        if kind not in _KINDS:
            raise SchemaError(
                f"{Path(path)} holds a record of unknown kind {kind} at byte {at}: upgrade strands-tito to read it."
            )
        yield Frame(Kind(kind), uuid, at + HEAD_BYTES, length)


def _only_zeros(file: BinaryIO) -> bool:
    """Tell whether nothing but zeros comes to the end of the file; leaves the file there."""
    while chunk := file.read(1 << 20):
        if any(chunk):
            return False
    return True


def _damaged(path: str | os.PathLike[str], at: int) -> SchemaError:
    return SchemaError(
        f"{Path(path)} is damaged: the record at byte {at} does not match its checksum. Nothing was changed; restore "
        "the file from a copy."
    )
