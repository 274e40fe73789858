"""Token ids as JSON text for requests: a prompt's text is kept and only extended with each turn (law 14)."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from tito_core.ledger.columns import TokenIds

ECHO = b'"prompt_token_ids":'
"""The field in which both engines echo the prompt ids."""
SAME_ECHO = msgspec.Raw(f'"{secrets.token_hex(16)}"'.encode())
"""Replaces an echo that equals the ids sent. Random, so that no server can send it."""
PIECE_IDS = 2**15
"""Ids that are encoded at once."""
PIECE_BYTES = 2**18
"""A body below this size is joined and sent at once. A larger one is sent in pieces, so that it does not block the
event loop (aiohttp warns from 1 MiB on) and its large parts are not copied."""

Pieces = tuple[bytes | memoryview, ...]
"""A request body in pieces."""


class IdText:
    """The text of a list of token ids, without its brackets, in parts that several lists may share. Immutable.

    Attributes:
        length: Number of ids.
    """

    __slots__ = ("_array", "_checksum", "_parts", "_size", "length")

    def __init__(
        self,
        parts: tuple[bytes, ...] = (),
        size: int = 0,
        length: int = 0,
        checksum: int = 0,
        array: TokenIds | None = None,
    ) -> None:
        self._parts = parts
        self._size = size  # of all parts, in bytes; each but the first begins with a comma
        self._checksum = checksum
        self._array = array
        self.length = length

    @classmethod
    def of(cls, ids: TokenIds) -> IdText:
        """Encode ids, int32, shape (n,)."""
        return cls().then(ids)

    def then(self, ids: TokenIds) -> IdText:
        """Return the text of these ids followed by `ids`; only the new ids are encoded."""
        if not len(ids):
            return self
        if len(ids) <= PIECE_IDS:
            new = msgspec.json.encode(ids.tolist())[1:-1]
        else:  # other threads run between the pieces
            pieces = (ids[at : at + PIECE_IDS] for at in range(0, len(ids), PIECE_IDS))
            new = b",".join([msgspec.json.encode(piece.tolist())[1:-1] for piece in pieces])
        parts, new = self._parts, b"," + new if self._parts else new
        checksum, size = zlib.crc32(_packed(ids), self._checksum), self._size + len(new)
        while parts and len(parts[-1]) <= len(new):  # so parts are few, and each byte is copied seldom
            parts, new = parts[:-1], parts[-1] + new
        return IdText((*parts, new), size, self.length + len(ids), checksum)

    def matches(self, ids: TokenIds) -> bool:
        """Return whether this is the text of `ids`, by their number and CRC-32.

        The echo proves which prompt was sent; this check proves that the ledger will hold the same prompt (law 4).
        """
        return ids is self._array or self.continues(IdText(), ids)

    def continues(self, before: IdText, ids: TokenIds) -> bool:
        """Return whether this is the text `before` extended by `ids`. Only `ids` are read."""
        length = before.length + len(ids)
        return self.length == length and self._checksum == zlib.crc32(_packed(ids), before._checksum)

    def for_array(self, ids: TokenIds) -> IdText:
        """Return this text bound to the array `ids`, so that `matches(ids)` does not read the array again.

        The caller guarantees that it matches `ids`.
        """
        ids.flags.writeable = False
        return IdText(self._parts, self._size, self.length, self._checksum, ids)

    def body(self, fields: Mapping[str, Any], name: str) -> bytes | Pieces:
        """Return a request's body: a JSON object with `fields`, which must not be empty, and the ids under `name`."""
        head = b'%b,"%b":[' % (msgspec.json.encode(fields)[:-1], name.encode())
        parts = (head, *self._parts, b"]}")
        return b"".join(parts) if len(head) + self._size < PIECE_BYTES else _pieces(parts)

    def is_echoed_in(self, echo: bytes) -> bool:
        """Return whether an undecoded list of ids equals this text byte for byte; a list with blanks does not."""
        return self._end_in(echo, 0) == len(echo)

    def without_echo(self, answer: bytes) -> bytes:
        """Return an answer whose echo is replaced by `SAME_ECHO` if it equals this text; else the answer unchanged.

        Comparing the bytes of a long prompt takes a tenth of the time that a JSON decoder needs to skip its numbers.
        """
        found = answer.find(ECHO)  # never inside a string, where its quotes would be escaped
        end = None if found < 0 else self._end_in(answer, found + len(ECHO))
        if end is None:
            return answer
        whole = memoryview(answer)
        return b"".join((whole[: found + len(ECHO)], SAME_ECHO, whole[end:]))

    def _end_in(self, body: bytes, at: int) -> int | None:
        """Return the offset after this list if `body` has it at offset `at`, else None."""
        for piece in (b"[", *self._parts, b"]"):
            if not body.startswith(piece, at):
                return None
            at += len(piece)
        return at


def in_pieces(body: bytes | Pieces) -> bytes | Pieces:
    """Cut a body that is too large for one piece; return any other body unchanged."""
    return tuple(_cut(body)) if isinstance(body, bytes) and len(body) > PIECE_BYTES else body


def _cut(part: bytes) -> list[memoryview]:
    whole = memoryview(part)
    return [whole[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]


def _pieces(parts: Iterable[bytes]) -> bytes | Pieces:
    """Join small parts and cut large ones; return one `bytes` if no part is large."""
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
