"""Bodies of answers: read up to a bound that holds after decompression, and turned into text."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from email.message import Message

INFO_BYTES = 4 << 20
"""Bound on an answer whose size follows from nothing that was asked: models, version, health, model info, admin."""
ERROR_BYTES = 1 << 18
"""Bound on the body of an error. What is longer is cut off there: the status still tells."""
_SLICE_BYTES = 1 << 18
"""Most bytes that one step of decompression gives."""


class BodyTooLargeError(Exception):
    """A body is longer than its bound.

    Attributes:
        limit: The bound, in bytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class UndecodableBodyError(Exception):
    """A body is not encoded as its Content-Encoding says, or in a way that was not asked for."""


async def read_whole(pieces: AsyncIterator[bytes], limit: int) -> bytes:
    """Read a body to its end.

    Raises:
        BodyTooLargeError: It is longer than `limit` bytes. No more than one piece past them was read.
    """
    found: list[bytes] = []
    length = 0
    async for piece in pieces:
        length += len(piece)
        if length > limit:
            raise BodyTooLargeError(limit)
        found.append(piece)
    return b"".join(found)


async def read_start(pieces: AsyncIterator[bytes], limit: int) -> bytes:
    """Read a body to its end, or to its first `limit` bytes."""
    found: list[bytes] = []
    length = 0
    async for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length >= limit:
            break
    return b"".join(found)[:limit]


class _Inflate:
    """Decompresses gzip or deflate, a slice at a time: one compressed piece may hold a thousand times its size."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 16) if coding == "gzip" else None

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        if self._inflate is None and piece:  # deflate comes with zlib's header, or without: zlib's names method 8
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if piece[0] & 15 == zlib.DEFLATED else -zlib.MAX_WBITS)
        while piece and self._inflate is not None:
            try:
                out = self._inflate.decompress(piece, _SLICE_BYTES)
            except zlib.error as error:
                raise UndecodableBodyError(f"it is not the {self._coding} that its Content-Encoding says") from error
            piece = self._inflate.unconsumed_tail
            if out:
                yield out


def _decoders(encoding: str) -> list[_Inflate]:
    """Return what undoes a Content-Encoding, the last coding first.

    Raises:
        UndecodableBodyError: A coding is neither gzip nor deflate.
    """
    codings = [coding.strip().lower() for coding in encoding.split(",")]
    found = []
    for coding in reversed([coding for coding in codings if coding not in ("", "identity")]):
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise UndecodableBodyError(f"its Content-Encoding is {coding!r}, though an unencoded answer was asked for")
        found.append(_Inflate(coding.removeprefix("x-")))
    return found


def _decode(piece: bytes, decoders: Sequence[_Inflate]) -> Iterator[bytes]:
    if not decoders:
        yield piece
        return
    for part in decoders[0](piece):
        yield from _decode(part, decoders[1:])


async def decode_pieces(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield the pieces of a body decompressed, each of at most a quarter of a mebibyte.

    Raises:
        UndecodableBodyError: See there.
    """
    decoders = _decoders(encoding)
    async for piece in pieces:
        for part in _decode(piece, decoders):
            yield part


def text_of(raw: bytes, encoding: str, content_type: str, limit: int) -> str:
    """Return the start of a body as text: by its charset, else as UTF-8, with U+FFFD for what is not text.

    Args:
        raw: As it came.
        encoding: Its Content-Encoding. A body that is not encoded so is taken as it is.
        content_type: Its Content-Type, which may name a charset.
        limit: Most bytes after decompression.
    """
    body = raw
    try:
        decoders, parts, length = _decoders(encoding), [], 0
        for part in _decode(raw, decoders):
            parts.append(part)
            length += len(part)
            if length >= limit:
                break
        body = b"".join(parts)[:limit]
    except UndecodableBodyError:
        pass
    header = Message()
    header["Content-Type"] = content_type
    try:
        text = body.decode(header.get_content_charset() or "utf-8", "replace")
    except (LookupError, ValueError):  # the charset encodes no text, or not so
        text = body.decode("utf-8", "replace")
    return text.encode("utf-8", "replace").decode()  # UTF-7 spells lone surrogates, which nothing could write down
