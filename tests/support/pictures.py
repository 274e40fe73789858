"""Headers of picture files, written by hand."""

from __future__ import annotations

import struct


def gif(width: int, height: int) -> bytes:
    """Return a header of a GIF."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0)


def jpeg_header(width: int, height: int) -> bytes:
    """Return the start of a JPEG: an APP0 segment, then a start of frame."""
    app = b"\xff\xe0" + struct.pack(">H", 16) + bytes(14)
    return b"\xff\xd8" + app + b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)


def webp_header(width: int, height: int, kind: bytes) -> bytes:
    """Return the start of a WebP of one of the three kinds."""
    if kind == b"VP8X":
        body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif kind == b"VP8L":
        body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little")
    else:
        body = bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height)
    return b"RIFF" + struct.pack("<I", len(body) + 12) + b"WEBP" + kind + struct.pack("<I", len(body)) + body
