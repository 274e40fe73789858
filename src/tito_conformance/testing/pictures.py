"""Pictures: drawn for tests as PNG files, without any library, and read as a scripted server reads them."""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

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


class BadImage(ValueError):
    """The bytes are not a readable image."""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How a scripted server reads images.

    Attributes:
        placeholder: Id of the placeholder token.
        cell: Side in pixels of what one token stands for.
        least: Fewest tokens of a picture.
        most: Most tokens of a picture.
        limit: Most images of a request, where the server has a limit (vLLM's `--limit-mm-per-prompt`).
        decodes: Whether the server decodes the ids of every request with images to text, and encodes that again, as
            SGLang does for some families without `--mm-preprocess-cache-size-mb`.
    """

    placeholder: int
    cell: int = 32
    least: int = 4
    most: int = 64
    limit: int = 8
    decodes: bool = False

    def tokens(self, data: bytes) -> int:
        """Return a picture's number of tokens.

        It has as many as cells of `cell` x `cell` pixels fit into it, after it was scaled to a whole number of cells in
        each direction and to between `least` and `most` cells, as Qwen's image processors do.

        Raises:
            BadImage: The bytes are not a readable image, or it is too long.
        """
        width, height = size(data)
        if max(width, height) > _ASPECT * min(width, height):
            raise BadImage(f"absolute aspect ratio must be smaller than {_ASPECT}, got {width} x {height}")
        return math.prod(self._cells(height, width))

    def _cells(self, height: int, width: int) -> tuple[int, int]:
        high, wide = height / self.cell, width / self.cell
        rows, columns = max(1, round(high)), max(1, round(wide))
        if rows * columns > self.most:
            shrink = math.sqrt(high * wide / self.most)
            return max(1, math.floor(high / shrink)), max(1, math.floor(wide / shrink))
        if rows * columns < self.least:
            stretch = math.sqrt(self.least / (high * wide))
            return math.ceil(high * stretch), math.ceil(wide * stretch)
        return rows, columns


class PlacedImage(NamedTuple):
    """An image of an expanded prompt: its placeholders, and a digest of its pixels."""

    offset: int
    length: int
    digest: bytes


def place(
    ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Expand the first placeholders of a prompt, one for each picture, and return the ids and where the pictures are.

    Placeholders or pictures that are left over change nothing; servers differ in what they make of them.

    Raises:
        BadImage: A picture cannot be read.
    """
    lengths = [settings.tokens(picture) for picture in pictures]
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    for token in ids:
        if token == settings.placeholder and len(placed) < len(pictures):
            n = len(placed)
            placed.append(PlacedImage(len(expanded), lengths[n], sha256(pixels(pictures[n])).digest()))
            expanded += [token] * lengths[n]
        else:
            expanded.append(token)
    return tuple(expanded), tuple(placed)


def size(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels, from the header of a PNG, JPEG, GIF or WebP file.

    Raises:
        BadImage: It is none of these.
    """
    found: tuple[int, int] | None = None
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        found = (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))
    elif data.startswith((b"GIF87a", b"GIF89a")):
        found = (int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little"))
    elif data.startswith(b"\xff\xd8"):
        found = _jpeg(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = _webp(data)
    if found is None or not all(found):
        raise BadImage("cannot identify image file <_io.BytesIO object>")
    return found


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Return the size in the first start-of-frame segment."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        kind, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        at += 2 + length
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(data) >= 30:
        return (
            int.from_bytes(data[26:28], "little") & 0x3FFF,
            int.from_bytes(data[28:30], "little") & 0x3FFF,
        )
    return None


_ASPECT = 200  # the longest picture that Qwen's processors take, in widths


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
