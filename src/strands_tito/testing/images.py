"""The images of scripted engines: how many tokens one has, and where they stand in a prompt.

A picture of w x h pixels has as many tokens as cells of `cell` x `cell` pixels fit into it, after it was scaled to a
whole number of cells in each direction and to between `least` and `most` cells, as Qwen's image processors do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, TypeVar

import numpy as np

from strands_tito.testing.pictures import pixels

_STAMP = 1 << 32
_Ids = TypeVar("_Ids", int, np.ndarray)
_ASPECT = 200  # the longest picture that Qwen's processors take, in widths


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


def stamped(ids: Sequence[int], images: Sequence[PlacedImage]) -> tuple[int, ...]:
    """Return ids with a stamp of the images before each, so that a function of ids is one of the images too.

    A stamp is a multiple of 2**32 below 2**62; before the first image it is 0.
    """
    if not images:
        return tuple(ids)
    whole, stamp = list(ids), b""
    ends = [*(image.offset for image in images[1:]), len(whole)]
    for image, end in zip(images, ends, strict=True):
        stamp = sha256(stamp + image.digest).digest()
        number = (int.from_bytes(stamp[:4], "big") >> 2) * _STAMP
        whole[image.offset : end] = [token + number for token in whole[image.offset : end]]
    return tuple(whole)


def weighted(ids: Sequence[int], weights: int) -> tuple[int, ...]:
    """Return ids with a stamp of the weights on each, besides that of images, so that scores depend on them too."""
    return tuple(ids) if not weights else tuple(id_ + weights * _STAMP for id_ in ids)


def token_of(id_: _Ids) -> _Ids:
    """Return a stamped id without its stamp, or the ids of an int64 array."""
    return id_ % _STAMP


def stamp_of(id_: int) -> int:
    """Return the stamp of an id."""
    return id_ - token_of(id_)


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
