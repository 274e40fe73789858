"""Small pictures for tests, drawn without any library: random stripes as PNG files."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

SIGNATURE = b"\x89PNG\r\n\x1a\n"
Colour = tuple[int, int, int]


def png(width: int, height: int, pixel: Callable[[int, int], Colour]) -> bytes:
    """Return an RGB PNG file; `pixel` returns the colour at (x, y)."""
    rows = b"".join(b"\0" + b"".join(bytes(pixel(x, y)) for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def picture(seed: int, width: int = 64, height: int = 64) -> bytes:
    """Return a PNG file of stripes in three colours. Another seed gives another picture of the same size."""
    draw = random.Random(seed)
    colours = [(draw.randrange(256), draw.randrange(256), draw.randrange(256)) for _ in range(3)]
    upright, stripe = draw.random() < 0.5, draw.randrange(4, 24)
    return png(width, height, lambda x, y: colours[(x if upright else y) // stripe % 3])


def same_pixels(data: bytes, comment: str = "again") -> bytes:
    """Return another PNG file of the same picture: with a comment."""
    end = data.rindex(b"IEND") - 4
    return data[:end] + _chunk(b"tEXt", b"Comment\0" + comment.encode("latin-1")) + data[end:]


def pixels(data: bytes) -> bytes:
    """Return what identifies a picture: header and image data of a PNG file, or else all bytes."""
    if not data.startswith(SIGNATURE):
        return data
    kept, at = [], len(SIGNATURE)
    while at + 12 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind in (b"IHDR", b"PLTE", b"IDAT"):
            kept.append(data[at + 4 : at + 8 + length])
        at += 12 + length
    return b"".join(kept)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
