"""The referee's reader of rollout files: the format in plain Python, without the package under test."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

PREAMBLE = 8
HEAD = struct.Struct("<IIB16sI")
HEADER, TURN, ANNOTATION, END = 1, 2, 3, 5


@dataclass(frozen=True)
class PlainFrame:
    """A record: its kind, the UUID of its ledger and its payload."""

    kind: int
    uuid: bytes
    payload: bytes

    def written(self, claim: int | None = None) -> bytes:
        """Return its bytes with correct checksums; `claim` is the length that it claims."""
        length = len(self.payload) if claim is None else claim
        facts = struct.pack("<IIB16s", length, zlib.crc32(self.payload), self.kind, self.uuid)
        return facts + struct.pack("<I", zlib.crc32(facts)) + self.payload


def frames_of(data: bytes) -> list[PlainFrame]:
    """Return the records of a sound file."""
    frames, at = [], PREAMBLE
    while at < len(data):
        length, checksum, kind, uuid, _ = HEAD.unpack_from(data, at)
        payload = data[at + HEAD.size : at + HEAD.size + length]
        assert zlib.crc32(payload) == checksum
        frames.append(PlainFrame(kind, uuid, payload))
        at += HEAD.size + length
    return frames


def unpacked(data: bytes) -> Any:
    """Decode one MessagePack value; ignore the bytes after it."""
    return _value(data, 0)[0]


_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_SIZES = {
    0xC4: (">B", bytes), 0xC5: (">H", bytes), 0xC6: (">I", bytes), 0xD9: (">B", str), 0xDA: (">H", str),
    0xDB: (">I", str), 0xDC: (">H", list), 0xDD: (">I", list), 0xDE: (">H", dict), 0xDF: (">I", dict),
}  # fmt: skip


def _value(data: bytes, at: int) -> tuple[Any, int]:
    tag, at = data[at], at + 1
    if tag < 0x80 or tag >= 0xE0:
        return (tag if tag < 0x80 else tag - 256), at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in _NUMBERS:
        form = _NUMBERS[tag]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if tag < 0xC0:
        kind: type = dict if tag < 0x90 else list if tag < 0xA0 else str
        size = tag & (0x1F if kind is str else 0x0F)
    else:
        form, kind = _SIZES[tag]
        size, at = struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if kind in (bytes, str):
        text = data[at : at + size]
        assert len(text) == size
        return (text.decode(errors="replace") if kind is str else text), at + size
    items = []
    for _ in range(size * (2 if kind is dict else 1)):
        item, at = _value(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind is dict else items), at
