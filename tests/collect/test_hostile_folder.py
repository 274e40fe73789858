"""A hostile index ends in SchemaError: it names nothing outside its folder, and costs no more than its size."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strands_tito.collect import CollectError, Rollout, RolloutFolder, Tasks, collect, collected
from strands_tito.viewer.rollouts import Rollouts
from support.made_up import made_up_result
from tito_core.store import SchemaError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one rollout."""
    path = tmp_path / "folder"
    with RolloutFolder(path, {}) as opened:
        task = next(iter(Tasks.of([{"question": "What?"}])))
        opened.append(made_up_result(Rollout(opened.index.run, task, 0)))
    return path


def rewrite(folder: Path, line: int, text: str) -> None:
    """Replace a line of the index, 0 the start and 1 the rollout."""
    lines = (folder / "index.jsonl").read_text().splitlines()
    lines[line] = text
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n")


def entry_with(folder: Path, **changes: Any) -> str:
    return json.dumps(json.loads((folder / "index.jsonl").read_text().splitlines()[1]) | changes)


def expect_refused(folder: Path, *uses: Callable[[], object]) -> None:
    tracemalloc.start()
    try:
        for use in uses or (lambda: RolloutFolder(folder, {}), lambda: list(collected(folder))):
            with pytest.raises(SchemaError):
                use()
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        *({"sample": sample} for sample in (-1, 1 << 16, 10**10, 10**30, -(10**30))),
        *({"digest": digest} for digest in ("", "-1", "0x12", "f" * 15, "f" * 17, "f" * 10_000, "F" * 16, "no digits")),
        *({name: -1} for name in ("end", "turns", "tokens", "sampled")),
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_value_out_of_range_is_refused_before_memory_is_taken(folder: Path, changes: dict[str, Any]) -> None:
    """A longer digest would mark samples as finished that were never run."""
    rewrite(folder, 1, entry_with(folder, **changes))
    expect_refused(folder)


@pytest.mark.parametrize(
    "name", ["../precious", "{absolute}", "", ".", "index.jsonl", "rollouts-00001.tito/../../precious"]
)
def test_a_file_outside_the_folder_is_neither_read_nor_cut(folder: Path, name: str) -> None:
    precious = folder.parent / "precious"
    shutil.copy(next(folder.glob("*.tito")), precious)
    before = precious.read_bytes()
    rewrite(folder, 1, entry_with(folder, file=name.format(absolute=precious), end=3))
    expect_refused(folder)
    assert precious.read_bytes() == before
    assert len(list(folder.glob("*.tito"))) == 1


@pytest.mark.parametrize("line", [0, 1])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"about":' * 100_000, '{"unknown":' + "[" * 100_000, "1" * 100_000, "\udc80"]
)
def test_nested_and_broken_lines_are_refused(folder: Path, line: int, text: str) -> None:
    lines = (folder / "index.jsonl").read_bytes().splitlines()
    lines[line] = text.encode(errors="surrogateescape")
    (folder / "index.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    expect_refused(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": 0.123},
        {"reward": None},
        {"termination": "truncated"},
        {"turns": 7},
        {"tokens": 7},
        {"sampled": 7},
        {"task": "another"},
        {"sample": 3},
        {"digest": "0123456789abcdef"},
    ],
    ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))),
)
def test_an_index_that_contradicts_its_ledger_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    """Every command that reads a folder reads it through these two."""
    rewarded = json.loads(entry_with(folder))["reward"] is not None
    if changes.get("reward", 0) is None and not rewarded:
        changes = {"reward": 1.0}
    rewrite(folder, 1, entry_with(folder, **changes))
    with Rollouts([folder]) as rollouts:
        for use in (lambda: list(collected(folder)), lambda: rollouts.load(1)):
            with pytest.raises(SchemaError, match=rf"contradicts ledger .*{next(iter(changes))} .*restore both"):
                use()


def test_an_index_that_another_program_shortened_is_not_filled_with_zeros(tmp_path: Path) -> None:
    task = next(iter(Tasks.of([{"question": "What?"}])))
    with RolloutFolder(tmp_path / "f", {}) as opened:
        opened.append(made_up_result(Rollout(opened.index.run, task, 0)))
        index = tmp_path / "f" / "index.jsonl"
        os.truncate(index, 40)
        with pytest.raises(SchemaError, match="has 40 bytes, and this collection wrote"):
            opened.append(made_up_result(Rollout(opened.index.run, task, 1)))
        assert index.stat().st_size == 40


def test_a_missing_ledger_or_file_of_the_index_is_refused(folder: Path) -> None:
    before = next(folder.glob("*.tito")).read_bytes()
    for ledger in ("00000009-0000-4000-8000-000000000000", "nope", ""):
        rewrite(folder, 1, entry_with(folder, ledger=ledger))
        expect_refused(folder)
    assert next(folder.glob("*.tito")).read_bytes() == before
    rewrite(folder, 1, entry_with(folder, file="rollouts-00002.tito"))
    expect_refused(folder)


@pytest.mark.timeout(20)
def test_an_index_that_is_no_file_is_refused(folder: Path) -> None:
    index = folder / "index.jsonl"
    for make in (index.mkdir, lambda: os.mkfifo(index)):
        index.unlink() if index.is_file() else index.rmdir()
        make()
        expect_refused(folder)


async def test_a_group_larger_than_the_index_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="at most 65536"):
        await collect([{"prompt": "What?"}], None, tmp_path, n=(1 << 16) + 1)  # type: ignore[arg-type]
