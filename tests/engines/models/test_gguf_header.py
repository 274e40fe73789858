"""The header reader against headers written here, the slow obvious way."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tito_engines.errors import ModelUnavailable
from tito_engines.models.smollm2 import Value, read_header

INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 5, 6, 7, 8, 9, 10


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(kind: int, value: Value) -> bytes:
    if kind == STRING:
        return _text(str(value))
    return struct.pack({INT32: "<i", FLOAT32: "<f", BOOL: "<?", UINT64: "<Q"}[kind], value)


def _file(entries: dict[str, tuple[int, int | None, Value]], version: int = 3) -> bytes:
    """Entries are key -> (type, element type or None, value)."""
    out = b"GGUF" + struct.pack("<IQQ", version, 7, len(entries))
    for key, (kind, element, value) in entries.items():
        out += _text(key) + struct.pack("<I", kind)
        if element is None:
            out += _typed(kind, value)
        else:
            assert isinstance(value, list)
            out += struct.pack("<IQ", element, len(value)) + b"".join(_typed(element, item) for item in value)
    return out


_SCALAR = {
    INT32: st.integers(-(2**31), 2**31 - 1),
    FLOAT32: st.floats(width=32, allow_nan=False),
    BOOL: st.booleans(),
    STRING: st.text(),
    UINT64: st.integers(0, 2**64 - 1),
}
_ENTRY = st.sampled_from(sorted(_SCALAR)).flatmap(
    lambda kind: st.one_of(
        _SCALAR[kind].map(lambda value: (kind, None, value)),
        st.lists(_SCALAR[kind], max_size=5).map(lambda values: (ARRAY, kind, values)),
    )
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=20), _ENTRY, max_size=6), st.sampled_from([2, 3]), st.binary())
def test_what_was_written_is_read(
    entries: dict[str, tuple[int, int | None, Value]], version: int, tensors: bytes
) -> None:
    assert read_header(io.BytesIO(_file(entries, version) + tensors)) == {
        k: value for k, (_, _, value) in entries.items()
    }


@settings(max_examples=30)
@given(st.data())
def test_a_file_cut_short_is_refused(data: st.DataObject) -> None:
    whole = _file({"general.name": (STRING, None, "tiny"), "ids": (ARRAY, INT32, [1, 2, 3])})
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ModelUnavailable):
        read_header(io.BytesIO(whole[:cut]))


def test_other_files_and_versions_are_refused() -> None:
    with pytest.raises(ModelUnavailable, match="GGUF file"):
        read_header(io.BytesIO(b"PK\x03\x04 and more"))
    with pytest.raises(ModelUnavailable, match="version 9"):
        read_header(io.BytesIO(_file({}, version=9)))
