"""Token ids as the JSON text that travels: a prompt's text is kept and grows with each turn (law 14)."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from tito_core.ledger.columns import TokenIds

ECHO = b'"prompt_token_ids":'
"""Under which name both engines echo a prompt's ids."""
SAME = msgspec.Raw(f'"{secrets.token_hex(16)}"'.encode())
"""Stands for an echo that was found to be what was sent. No server knows it."""
PARTS = 64
"""Parts from which on they are joined into one."""
PIECE_BYTES = 2**18
"""A body up to this size is joined and sent at once. Of a larger one the parts of this size are sent as they lie in
memory, in pieces, so that the event loop is not held up; aiohttp warns of that from a mebibyte on."""

Pieces = tuple[bytes | memoryview, ...]
"""A body, in the pieces in which it is sent."""


class IdText:
    """The text of a list of token ids, without its brackets, in parts that several lists may share. Immutable.

    Attributes:
        length: Number of ids.
    """

    __slots__ = ("_checksum", "_parts", "_size", "_stands_for", "length")

    def __init__(
        self,
        parts: tuple[bytes, ...] = (),
        size: int = 0,
        length: int = 0,
        checksum: int = 0,
        stands_for: TokenIds | None = None,
    ) -> None:
        self._parts = parts
        self._size = size  # of all parts and what is between them, in bytes
        self._checksum = checksum
        self._stands_for = stands_for
        self.length = length

    @classmethod
    def of(cls, ids: TokenIds) -> IdText:
        """Write ids, int32, shape (n,)."""
        return cls().then(ids)

    def then(self, ids: TokenIds) -> IdText:
        """Give these ids and more; only what is new is written."""
        if not len(ids):
            return self
        new = msgspec.json.encode(ids.tolist())[1:-1]
        parts, size = (*self._parts, new), self._size + 1 + len(new)
        checksum = zlib.crc32(_packed(ids), self._checksum)
        return IdText(parts if len(parts) < PARTS else (b",".join(parts),), size, self.length + len(ids), checksum)

    def is_of(self, ids: TokenIds) -> bool:
        """Return whether it is the text of these ids, by their number and CRC-32: a kept text could be another's.

        The echo of a prompt proves what was sent; this, that it was the prompt that the ledger will hold (law 4).
        """
        return ids is self._stands_for or self.goes_on(IdText(), ids)

    def goes_on(self, before: IdText, ids: TokenIds) -> bool:
        """Return whether it was written of the ids of another text and then of these, which alone are looked at."""
        length = before.length + len(ids)
        return self.length == length and self._checksum == zlib.crc32(_packed(ids), before._checksum)

    def standing_for(self, ids: TokenIds) -> IdText:
        """Return it as the text of this very array, which is then not read again.

        The caller guarantees that it matches `ids`.
        """
        ids.flags.writeable = False
        return IdText(self._parts, self._size, self.length, self._checksum, ids)

    def body(self, fields: Mapping[str, Any], name: str) -> bytes | Pieces:
        """Return a request's body: a JSON object of these fields, which are not empty, and of the list under `name`."""
        head = b'%b,"%b":[' % (msgspec.json.encode(fields)[:-1], name.encode())
        if self._parts and len(head) + self._size < PIECE_BYTES:
            first, rest = self._parts[0], self._parts[1:]  # the first is most of it, and is copied once
            return b"".join((head, first, b"," if rest else b"", b",".join(rest), b"]}"))
        return _pieces((head, *self._separated(), b"]}"))

    def is_echoed_in(self, echo: bytes) -> bool:
        """Return whether an answer's list is this very text, without decoding it; one with blanks is not."""
        return self._end_in(echo, 0) == len(echo)

    def without_echo(self, answer: bytes) -> bytes:
        """Return an answer with `SAME` in place of its echo where that is this very text; else the answer as it is.

        To compare the bytes of a long prompt takes a tenth of what it takes a decoder to pass over its numbers.
        """
        found = answer.find(ECHO)  # in no string: a quote would be escaped there
        end = None if found < 0 else self._end_in(answer, found + len(ECHO))
        if end is None:
            return answer
        whole = memoryview(answer)
        return b"".join((whole[: found + len(ECHO)], SAME, whole[end:]))

    def _end_in(self, body: bytes, at: int) -> int | None:
        """Give where this list ends that a body has from a place on, or None where it has another."""
        for piece in (b"[", *self._separated(), b"]"):
            if not body.startswith(piece, at):
                return None
            at += len(piece)
        return at

    def _separated(self) -> list[bytes]:
        pieces: list[bytes] = []
        for part in self._parts:
            pieces += (b",", part) if pieces else (part,)
        return pieces


def in_pieces(body: bytes | Pieces) -> bytes | Pieces:
    """Cut a body that is too large for one piece; another is given as it is."""
    return tuple(_cut(body)) if isinstance(body, bytes) and len(body) > PIECE_BYTES else body


def _cut(part: bytes) -> list[memoryview]:
    whole = memoryview(part)
    return [whole[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]


def _pieces(parts: Iterable[bytes]) -> bytes | Pieces:
    """Join parts that are small, and leave or cut those that are not; all of them are one where none is large."""
    found: list[bytes | memoryview] = []
    small: list[bytes] = []
    size = 0
    for part in parts:
        size += len(part)
        if len(part) >= PIECE_BYTES:
            found += [b"".join(small), *_cut(part)]
            small, size = [], 0
        elif size > PIECE_BYTES:
            found.append(b"".join(small))
            small, size = [part], len(part)
        else:
            small.append(part)
    rest = b"".join(small)
    return (*found, rest) if found else rest


def _packed(ids: TokenIds) -> memoryview:
    return np.ascontiguousarray(ids, "<i4").data
