"""A hostile file raises the documented error and costs memory and time in proportion to its size (law 12)."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.drafts import make_draft
from support.growth import expect_linear
from tito_core import store
from tito_core.ledger import Column, Header, LawViolationError, Ledger, Sampling
from tito_core.store import SchemaError
from tito_core.store.frames import PREAMBLE

UUID = "00000001-0000-4000-8000-000000000000"
REFUSED = (SchemaError, LawViolationError)
HEADER, TURN, ANNOTATION = 1, 2, 3
MEMORY_FACTOR, MEMORY_FLOOR = 256, 1 << 20
"""Most bytes of memory per byte of a file, and most bytes for reading the smallest file."""


def good() -> Ledger:
    made = Ledger(UUID)
    made.commit(make_draft(None, 0, [100, 101], [200, 201], extras={"routed_experts": Column.of(0, [[1], [2], [3]])}))
    made.annotate("reward", 1.0)
    return made


def frame(kind: int, payload: bytes, length: int | None = None) -> bytes:
    """Return a record with correct checksums; `length` is the length that it claims."""
    uuid = bytes.fromhex(UUID.replace("-", ""))
    facts = struct.pack("<IIB16s", len(payload) if length is None else length, zlib.crc32(payload), kind, uuid)
    return facts + struct.pack("<I", zlib.crc32(facts)) + payload


def file_of(record: dict[str, Any], raw: dict[int, bytes] | None = None) -> bytes:
    """Return a file of one ledger from its plain values; `raw` replaces records by bytes."""
    raw = raw or {}
    parts = [frame(HEADER, raw.get(HEADER) or msgspec.msgpack.encode(record["header"]))]
    parts += [frame(TURN, raw.get(TURN) or msgspec.msgpack.encode(turn)) for turn in record["turns"]]
    parts += [frame(ANNOTATION, raw.get(ANNOTATION) or msgspec.msgpack.encode(note)) for note in record["annotations"]]
    return PREAMBLE + b"".join(parts)


def with_turn(**changes: Any) -> dict[str, Any]:
    """Return the good ledger's plain values with a changed turn."""
    record = store.to_record(good())
    record["turns"][0] |= changes
    return record


def peak_of(use: Callable[[], object]) -> int:
    """Return the peak memory of Python objects and arrays while `use` runs, in bytes."""
    tracemalloc.start()
    try:
        use()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def expect_refused(path: Path, data: bytes, error: Any = REFUSED) -> None:
    path.write_bytes(data)

    def use() -> None:
        with pytest.raises(error):
            store.read(path)

    assert peak_of(use) <= MEMORY_FLOOR + MEMORY_FACTOR * len(data)


@pytest.mark.parametrize("claim", [2**16, 2**24, 2**32 - 1])
def test_a_claimed_length_is_compared_with_the_file_before_allocating(tmp_path: Path, claim: int) -> None:
    path = tmp_path / "rollouts.tito"
    path.write_bytes(PREAMBLE + frame(HEADER, b"x", claim))
    assert path.stat().st_size == 38
    assert peak_of(lambda: store.read(path)) < MEMORY_FLOOR
    with store.LedgerFile(path, "a") as file:  # cuts the torn tail off, as after a crash
        file.append(good())
    assert [ledger.uuid for ledger in store.read(path)] == [UUID]


@pytest.mark.parametrize("kind", [HEADER, TURN, ANNOTATION])
@pytest.mark.parametrize(
    "start", [b"\x91", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x81\xa1a", b"\xc6\xff\xff\xff\xff"]
)
def test_nested_and_overlong_values_are_refused(tmp_path: Path, kind: int, start: bytes) -> None:
    for depth in (1, 200, 100_000):
        expect_refused(tmp_path / "rollouts.tito", file_of(store.to_record(good()), {kind: start * depth + b"\xc0"}))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def packed(depth: int) -> msgspec.Raw:
    return msgspec.Raw(b"\x91" * depth + b"\x01")


@pytest.mark.parametrize("depth", [600, 950, 100_000])
def test_nested_values_where_anything_is_allowed_are_refused(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "rollouts.tito"
    record = store.to_record(good())
    for changed in (
        {**record, "header": {**record["header"], "user": {"a": packed(depth)}}},
        {**record, "header": {**record["header"], "certificate": {"a": packed(depth)}}},
        {**record, "annotations": [{"name": "reward", "value": packed(depth)}]},
        with_turn(sampling={"a": packed(depth)}),
        with_turn(unknown=packed(depth)),
    ):
        expect_refused(path, file_of(changed))


def test_a_ledger_is_not_appended_after_a_nested_header_of_its_uuid(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    path.write_bytes(file_of(store.to_record(good()), {HEADER: packed(100_000)}))
    with store.LedgerFile(path, "a") as file, pytest.raises(SchemaError):
        file.append(good())


@pytest.mark.parametrize("depth", [600, 100_000])
def test_nested_json_is_refused(depth: int) -> None:
    plain = json.loads(json.dumps(store.to_json(good())))
    deep = nested(depth)
    turn = plain["turns"][0]
    columns = turn["columns"]
    for record in (
        {**plain, "header": {**plain["header"], "user": {"a": deep}}},
        {**plain, "annotations": [{"name": "reward", "value": deep}]},
        {**plain, "turns": [{**turn, "sampling": {"a": deep}}]},
        {**plain, "turns": [{**turn, "engine": deep}]},
        {**plain, "turns": [deep]},
        *({**plain, "turns": [{**turn, "columns": {**columns, name: deep}}]} for name in columns),
    ):
        with pytest.raises(SchemaError):
            store.from_json(record)


def test_deeply_nested_values_are_refused_before_they_are_stored(tmp_path: Path) -> None:
    """They could be written, but not read back."""
    Header(UUID, user={"a": nested(90)})
    ledger = good()
    for depth in (110, 600, 100_000):
        with pytest.raises(ValueError, match="deep"):
            Header(UUID, user={"a": nested(depth)})
        with pytest.raises(ValueError, match="deep"):
            ledger.annotate("score", nested(depth))
    assert len(ledger.annotations) == 1
    with store.LedgerFile(tmp_path / "rollouts.tito", "a") as file:
        file.attach(ledger)
        for depth in (600, 100_000):
            with pytest.raises(ValueError, match="deep"):
                ledger.commit(make_draft(0, 4, [102], [202], sampling=Sampling({"a": nested(depth)})))
        assert len(ledger) == 1


def test_a_long_string_among_short_ones_is_not_allocated_for_each() -> None:
    record = store.to_json(good())
    for name in record["turns"][0]["columns"]:
        changed = json.loads(json.dumps(record))
        changed["turns"][0]["columns"][name] = ["a" * 100_000] + ["a"] * 10_000

        def use(changed: Any = changed) -> None:
            with pytest.raises(SchemaError):
                store.from_json(changed)

        assert peak_of(use) < 16 << 20


COLUMN = {"start": 0, "dtype": "|u1", "shape": [3, 1], "buffer": b"\0\1\2"}


@pytest.mark.parametrize(
    "shape",
    [
        [],
        [-1, -3],
        [3, -1],
        [4, 1],
        [2**63, 2**63],
        [0, 2**63],
        [2**63, 0],
        [3] + [1] * 70,
        [2**63] * 100_000,
        [0] + [2**63] * 30,
    ],
    ids=lambda shape: f"{shape[:3]} of {len(shape)}",
)
def test_impossible_shapes_are_refused(tmp_path: Path, shape: list[int]) -> None:
    buffer = b"" if 0 in shape else COLUMN["buffer"]
    for name in ("routed_experts", "top_ids") if len(shape) < 1_000 else ("top_ids",):
        column = {**COLUMN, "shape": shape, "buffer": buffer}
        extras = {name: column} if name == "routed_experts" else {"top_ids": column, "top_logprobs": column}
        expect_refused(tmp_path / "rollouts.tito", file_of(with_turn(extras=extras)))


UNREADABLE: list[dict[str, Any]] = [
    *({"parent": parent} for parent in (0, -1, 2**63, "0")),
    *({"sampling": sampling} for sampling in (0, -1, None)),
    *(
        {"sampling": {"stop": stop}}
        for stop in ([b"bytes"], msgspec.msgpack.Ext(5, b"a"), datetime(2026, 1, 1, tzinfo=UTC))
    ),
    {"engine": {"server": 1}},
    {"columns": {"prompt": 1, "output": 1, "buffer": b""}},
    {"columns": {"prompt": 2**63, "output": 2, "buffer": b""}},
    {"columns": {"prompt": -8, "output": 5, "buffer": b""}},
    {"columns": {"prompt": -1, "output": 2, "buffer": bytes(11)}},
    {"columns": {"prompt": 2, "output": 2, "buffer": bytes(25)}},
    *({"extras": {"a": {**COLUMN, "dtype": dtype}}} for dtype in ("|S1", "|O", "(1000000000,)u1")),
    {"finish": "done"},
    {"branch": {"reason": "mood"}},
    {"calls": [["look"]]},
    {"media": [[0, 1]]},
    {"a field of a newer version": 1},
    *({"fingerprint": text} for text in ("", "abcd", "xx" * 32)),  # a string in a file is not base64
]
OUT_OF_RANGE: list[dict[str, Any]] = [
    {"prompt_length": -2},
    {"max_new_tokens": -1},
    {"call_ids": -1},
    *({"calls": [["look", "ok", start, stop, ""]]} for start, stop in ((-1, 1), (0, 2**63))),
    *({"media": [[offset, length, bytes(32)]]} for offset, length in ((0, 2**63), (-1, 1))),
    *({"branch": {"reason": "edit", "turn": turn}} for turn in (2**63, -1)),
    *({"extras": {"a": {**COLUMN, "start": start}}} for start in (-1, 2**63)),
]


@pytest.mark.parametrize(
    ("changes", "error"),
    [*((changes, SchemaError) for changes in UNREADABLE), *((changes, REFUSED) for changes in OUT_OF_RANGE)],
    ids=lambda value: str(value).split(" object at")[0],
)
def test_values_out_of_range_are_refused(tmp_path: Path, changes: dict[str, Any], error: Any) -> None:
    expect_refused(tmp_path / "rollouts.tito", file_of(with_turn(**changes)), error)


def test_a_record_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    expect_refused(tmp_path / "rollouts.tito", file_of(store.to_record(good())) + frame(9, b"x"), SchemaError)


@pytest.mark.parametrize("cached", [-1, 2**64 - 1])
def test_engine_records_out_of_range_are_refused(tmp_path: Path, cached: int) -> None:
    record = with_turn()
    engine = record["turns"][0]["engine"]
    for changes in (
        {"server": 0},
        {"server": 2**63},
        {"latency_s": -1.0},
        {"latency_s": float("nan")},
        {"versions": [[0, 2**63, None]]},
        {"versions": [[0, 1, None], [2**62, 2, None]]},
        {"responses": [[0, 3, "a"]]},
        {"cached_tokens": cached},
    ):
        changed = {**record, "turns": [{**record["turns"][0], "engine": {**engine, **changes}}]}
        expect_refused(tmp_path / "rollouts.tito", file_of(changed))


def test_time_is_linear_with_long_keys(tmp_path: Path) -> None:
    """Errors contain the path of a value. It must not be formatted for every value."""
    paths = []
    for count in (1, 4):
        record = store.to_record(good())
        record["header"]["user"] = {"k" * 50_000 * count: list(range(50_000 * count))}
        paths.append(tmp_path / f"{count}.tito")
        paths[-1].write_bytes(file_of(record))
    expect_linear(lambda count: store.read(paths[count > 1]))


def test_time_is_linear_with_the_length_of_an_impossible_shape(tmp_path: Path) -> None:
    """The product of its sizes must not be computed: it has 63 bits more with each size."""
    paths = []
    for count in (1, 4):
        column = {**COLUMN, "shape": [2**63] * 50_000 * count}
        paths.append(tmp_path / f"{count}.tito")
        paths[-1].write_bytes(file_of(with_turn(extras={"top_ids": column, "top_logprobs": column})))

    def refused(count: int) -> None:
        with pytest.raises(REFUSED):
            store.read(paths[count > 1])

    expect_linear(refused)


def test_time_is_linear_with_many_ledgers_before_zeros(tmp_path: Path) -> None:
    paths = []
    for count in (1, 4):
        paths.append(tmp_path / f"{count}.tito")
        store.append(paths[-1], [Ledger() for _ in range(250 * count)])
        with paths[-1].open("ab") as file:
            file.write(bytes(1_000_000 * count))
    expect_linear(lambda count: store.read(paths[count > 1]))
    assert len(store.read(paths[1])) == 1_000


def test_time_is_linear_with_many_leaves_on_one_trunk(tmp_path: Path) -> None:
    """To list the leaves visits each turn once, and not each trajectory from its first turn."""
    paths = []
    for count in (1, 4):
        turns = 375 * count
        ledger = Ledger(UUID)
        for turn in range(turns):
            ledger.commit(make_draft(turn - 1 if turn else None, 2 * turn, [100], [200]))
        for _ in range(turns):
            ledger.commit(make_draft(turns - 1, 2 * turns, [100], [200]))
        paths.append(tmp_path / f"{count}.tito")
        store.append(paths[-1], [ledger])
    expect_linear(lambda count: store.read(paths[count > 1])[0].leaves())
    assert len(store.read(paths[1])[0].leaves()) == 1_500
