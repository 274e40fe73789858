"""Token ids as the JSON text that travels: a prompt's text is kept and grows with each turn (law 14)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from tito_core.ledger.columns import TokenIds

PARTS = 64
"""Parts from which on they are joined into one."""


class IdText:
    """The text of a list of token ids, without its brackets, in parts that several lists may share. Immutable.

    Attributes:
        length: Number of ids.
    """

    __slots__ = ("_checksum", "_parts", "length")

    def __init__(self, parts: tuple[bytes, ...] = (), length: int = 0, checksum: int = 0) -> None:
        self._parts = parts
        self._checksum = checksum
        self.length = length

    @classmethod
    def of(cls, ids: TokenIds) -> IdText:
        """Write ids, int32, shape (n,)."""
        return cls().then(ids)

    def then(self, ids: TokenIds) -> IdText:
        """Give these ids and more; only what is new is written."""
        if not len(ids):
            return self
        parts = (*self._parts, msgspec.json.encode(ids.tolist())[1:-1])
        checksum = zlib.crc32(_packed(ids), self._checksum)
        return IdText(parts if len(parts) < PARTS else (b",".join(parts),), self.length + len(ids), checksum)

    def is_of(self, ids: TokenIds) -> bool:
        """Tell whether it was written of these ids, by their number and CRC-32: a text that is kept could be another's.

        The echo of a prompt proves what was sent; this, that it was the prompt that the ledger will hold (law 4).
        """
        return self.length == len(ids) and self._checksum == zlib.crc32(_packed(ids))

    def body(self, fields: Mapping[str, Any], name: str) -> bytes:
        """Give a request's body: a JSON object of these fields, which are not empty, and of the list under `name`."""
        head = msgspec.json.encode(fields)[:-1]
        return b"".join((head, b',"', name.encode(), b'":[', *self._separated(), b"]}"))

    def is_echoed_in(self, echo: memoryview) -> bool:
        """Tell whether an answer's list is this very text, without decoding it; one with blanks is not."""
        if len(echo) < 2 or echo[0] != 0x5B or echo[-1] != 0x5D:  # [ and ]
            return False
        at, last = 1, len(echo) - 1
        for part in self._separated():
            if echo[at : at + len(part)] != part:
                return False
            at += len(part)
        return at == last

    def _separated(self) -> list[bytes]:
        pieces: list[bytes] = []
        for part in self._parts:
            pieces += (b",", part) if pieces else (part,)
        return pieces


def _packed(ids: TokenIds) -> memoryview:
    return np.ascontiguousarray(ids, "<i4").data
