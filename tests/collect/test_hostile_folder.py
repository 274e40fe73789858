"""A hostile folder ends in SchemaError, and costs no more than its size."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fuzz.plain_file import END, PREAMBLE, PlainFrame, frames_of
from strands_tito.collect import CollectError, Rollout, RolloutFolder, Tasks, collect, collected
from support.made_up import made_up_result
from tito_core.store import SchemaError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one rollout."""
    path = tmp_path / "folder"
    with RolloutFolder(path, {}) as opened:
        task = next(iter(Tasks.of([{"question": "What?"}])))
        opened.append(made_up_result(Rollout(opened.run, task, 0)))
    return path


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the payload of the END record."""
    file = folder / "rollouts-00001.tito"
    data = file.read_bytes()
    *frames, end = frames_of(data)
    assert end.kind == END
    changed = [*frames, PlainFrame(END, end.uuid, change(end.payload))]
    file.write_bytes(data[:PREAMBLE] + b"".join(frame.written() for frame in changed))


def expect_refused(folder: Path) -> None:
    tracemalloc.start()
    try:
        for use in (lambda: RolloutFolder(folder, {}), lambda: list(collected(folder))):
            with pytest.raises(SchemaError):
                use()
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        *({"sample": sample} for sample in (-1, 1 << 16, 10**10, 0.5, "0")),
        *({"digest": digest} for digest in ("", "0x12", "f" * 15, "f" * 17, "f" * 10_000, "F" * 16, "0" * 16 + "\n")),
        *({name: -1} for name in ("turns", "tokens", "sampled")),
        {"task": None},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_value_out_of_range_is_refused_before_memory_is_taken(folder: Path, changes: dict[str, Any]) -> None:
    """A longer digest would mark samples as finished that were never run."""
    rewrite(folder, lambda payload: msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | changes))
    expect_refused(folder)


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_header_a_turn_or_another_end_after_the_end_is_refused(folder: Path, number: int) -> None:
    """The facts would be those of fewer turns, or hide another rollout's."""
    file = folder / "rollouts-00001.tito"
    data = file.read_bytes()
    file.write_bytes(data + frames_of(data)[number].written())
    expect_refused(folder)


@pytest.mark.parametrize("payload", [b"", b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\xdf\xff\xff\xff\xff", b"\x80"])
def test_nested_and_broken_records_are_refused(folder: Path, payload: bytes) -> None:
    rewrite(folder, lambda _: payload)
    expect_refused(folder)


@pytest.mark.parametrize(
    "text", ["17", "[" * 100_000, '{"about":' * 100_000, '{"run":"1","schema":3}', '{"run":"1","format":"another"}', ""]
)
def test_a_description_that_is_damaged_newer_or_none_is_refused(folder: Path, text: str) -> None:
    (folder / "collection.json").write_text(text)
    expect_refused(folder)


@pytest.mark.timeout(20)
def test_a_description_that_is_no_file_is_refused(folder: Path) -> None:
    path = folder / "collection.json"
    for make in (path.mkdir, lambda: os.mkfifo(path)):
        path.unlink() if path.is_file() else path.rmdir()
        make()
        expect_refused(folder)


@pytest.mark.parametrize("line", [b"{}\n", b"[" * 100_000 + b"\n", b'{"task":"a","sample":65536}\n'])
def test_a_damaged_line_of_an_index_of_schema_1_is_refused(folder: Path, line: bytes) -> None:
    (folder / "index.jsonl").write_bytes((folder / "collection.json").read_bytes() + line)
    expect_refused(folder)


async def test_a_group_larger_than_a_folder_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="at most 65536"):
        await collect([{"prompt": "What?"}], None, tmp_path, n=(1 << 16) + 1)  # type: ignore[arg-type]
