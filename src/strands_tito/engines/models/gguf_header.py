"""Read the metadata of a GGUF file, which a tokenizer is built from, without the `gguf` package.

Layout (GGUF version 2 and 3, little-endian): magic `GGUF`, uint32 version, uint64 tensor count, uint64 entry count,
then the entries: a string key, a uint32 type, a value. A string is a uint64 length and UTF-8 bytes; an array is a
uint32 element type, a uint64 count, and the elements.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

from strands_tito.engines.errors import ModelUnavailable

Value = bool | int | float | str | list["Value"]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_header(stream: BinaryIO) -> dict[str, Value]:
    """Return the metadata entries in the file's order. Tensors are not read.

    Raises:
        ModelUnavailable: Not a GGUF file, an unsupported version, or a truncated file.
    """
    try:
        if stream.read(4) != b"GGUF":
            raise ModelUnavailable("Not a GGUF file: it does not start with GGUF.")
        version, _tensors, entries = _unpack(stream, "IQQ")
        if version not in (2, 3):
            raise ModelUnavailable(f"GGUF version {version} is not supported; versions 2 and 3 are.")
        return {_string(stream): _value(stream, int(_unpack(stream, "I")[0])) for _ in range(int(entries))}
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"The GGUF header cannot be read ({error!r}): fetch the file again.") from error


def _unpack(stream: BinaryIO, layout: str) -> tuple[int | float | bool, ...]:
    layout = "<" + layout
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _string(stream: BinaryIO) -> str:
    length = int(_unpack(stream, "Q")[0])
    return stream.read(length).decode("utf-8")


def _value(stream: BinaryIO, kind: int) -> Value:
    if kind == _STRING:
        return _string(stream)
    if kind == _ARRAY:
        element, count = (int(number) for number in _unpack(stream, "IQ"))
        if element in (_STRING, _ARRAY):
            return [_value(stream, element) for _ in range(count)]
        return list(_unpack(stream, f"{count}{_SCALARS[element]}"))
    return _unpack(stream, _SCALARS[kind])[0]
