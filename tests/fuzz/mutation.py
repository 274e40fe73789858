"""Hostile changes of bytes and of JSON-like values, for all targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Path = tuple[Any, ...]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1,
    0.0, -0.0, 0.5, -0.5, 1.0, 1e300, -9999.0, -10000.0, "", "0", "a", "<|im_end|>", "token_id:1", "\x00",
    "é😀", "x" * 5_000,
    [], {}, [[]], [None], [0], [-1], ["a"], {"a": 1}, {"": None}, [1.5], [[0, 0]], [0] * 300,
)  # fmt: skip
"""Unexpected values of every JSON type."""

RAW: tuple[str, ...] = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 400, "1" * 5_000, "-" + "9" * 30, "1.0",
    "1e2", "-0", "5e-324",
    "[" * 200 + "]" * 200, "[" * 20_000 + "]" * 20_000, "[" * 20_000, '{"a":' * 2_000 + "1" + "}" * 2_000,
    '"\\ud800"', '"\\u0000"', "\x00", "01", "+1", "undefined", '"', "}", "]", ",", '{"a":1,"a":2}',
)  # fmt: skip
"""JSON text, valid or not, that `json.dumps` never writes."""

_RAW_MARK = "\x01raw%d\x01"


def changed_value(value: Any, random: Random, *, raw: bool = False) -> Any:
    """Return a deep copy with one to three changes; with `raw`, some are marks that `dumped` replaces by `RAW` text."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _changed_once(value, random, raw=raw)
    return value


def dumped(value: Any) -> str:
    """Return JSON, with `RAW` text in place of marks."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if "\\u0001raw" in text:
        for number, raw in enumerate(RAW):
            text = text.replace(json.dumps(_RAW_MARK % number), raw)
    return text


def changed_bytes(data: bytes, random: Random) -> bytes:
    """Return bytes with one hostile change."""
    return random.choice(_OF_BYTES)(bytearray(data), random)


def paths(value: Any, above: Path = ()) -> list[Path]:
    """Return the paths of all values in a value, its own first."""
    places = [above]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        places += paths(item, (*above, key))
    return places


def at(value: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


def _changed_once(value: Any, random: Random, *, raw: bool) -> Any:
    places = paths(value)
    path = random.choice(places)
    change = random.randrange(10)
    if change < 4 or not path:
        mark = raw and random.random() < 0.3
        return _put(value, path, _RAW_MARK % random.randrange(len(RAW)) if mark else random.choice(VALUES))
    old = at(value, path)
    if change == 4:
        return _put(value, path, at(value, random.choice(places)))  # a value from another place
    if change == 5 and isinstance(old, int | float):
        return _put(value, path, random.choice((old + 1, old - 1, -old, float(old), str(old), old * 2)))
    if change == 6:
        return _put(value, path, [old] if random.random() < 0.5 else {"a": old})
    holder, key = at(value, path[:-1]), path[-1]
    if isinstance(holder, dict):
        kept = {name: item for name, item in holder.items() if name != key}
        renamed = {f"{key}x": old} if change == 8 else {"unknown": old, key: old} if change == 9 else {}
        return _put(value, path[:-1], {**kept, **renamed})
    copy = list(holder)
    if change == 7:
        del copy[key]
    elif change == 8:
        copy.insert(key, old)
    else:
        random.shuffle(copy)
    return _put(value, path[:-1], copy)


def _put(value: Any, path: Path, new: Any) -> Any:
    """Return a copy with another value at a path."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: _put(value[key], tuple(rest), new)}
    return [_put(item, tuple(rest), new) if index == key else item for index, item in enumerate(value)]


def _flip(data: bytearray, random: Random) -> bytes:
    for _ in range(random.choice((1, 1, 2, 3, 8))):
        if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _truncate(data: bytearray, random: Random) -> bytes:
    return bytes(data[: random.randrange(len(data) + 1)])


def _insert(data: bytearray, random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    new = random.choice((bytes(random.randrange(1, 300)), random.randbytes(random.randrange(1, 40)), b"\xff" * 5))
    return bytes(data[:place] + new + data[place:])


def _remove(data: bytearray, random: Random) -> bytes:
    start, stop = _slice(data, random)
    return bytes(data[:start] + data[stop:])


def _splice(data: bytearray, random: Random) -> bytes:
    start, stop = _slice(data, random)
    place = random.randrange(len(data) + 1)
    return bytes(data[:place] + data[start:stop] + data[place:])


def _huge(data: bytearray, random: Random) -> bytes:
    """Overwrite bytes with a huge length, as MessagePack or as an integer of either byte order."""
    place = random.randrange(len(data) + 1)
    lengths = (b"\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
    new = random.choice((*lengths, b"\xdb\x7f\xff\xff\xff", b"\xdc\xff\xff", b"\xde\xff\xff", b"\xcf" + b"\xff" * 8))
    return bytes(data[:place] + new + data[place + len(new) :])


def _nest(data: bytearray, random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    new = random.choice((b"\x91", b"\x81\xa1a", b"\x81")) * random.choice((50, 500, 5_000))
    return bytes(data[:place] + new + data[place + random.choice((0, 1)) :])


def _slice(data: bytearray, random: Random) -> tuple[int, int]:
    start, stop = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
    return start, stop


_OF_BYTES: tuple[Callable[[bytearray, Random], bytes], ...] = (
    _flip,
    _flip,
    _truncate,
    _insert,
    _remove,
    _splice,
    _huge,
    _nest,
)
