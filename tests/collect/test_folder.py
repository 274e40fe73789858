"""A folder of rollouts has each rollout once or not at all after a kill or a power cut at any moment."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.collect import Entry, FolderError, Rollout, RolloutFolder, TaskError, Tasks, collected, entries
from strands_tito.collect.folder import read_start
from support.made_up import made_up_result
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile, SchemaError, encode

ABOUT = {"agent": "tests:run", "sampling": {"temperature": 0.5}}
TASKS = Tasks.of([{"question": f"What is {number}?"} for number in range(7)])
SAMPLES = 2
FILE_BYTES = 4_000
"""Small, so that rollouts fill several files."""


def rollouts(run: str) -> list[Rollout]:
    return [Rollout(run, task, sample) for task in TASKS for sample in range(SAMPLES)]


def fill(path: Path) -> None:
    """Add every rollout that is missing."""
    with RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES) as folder:
        for rollout in rollouts(folder.index.run):
            if not folder.index.finished_samples(rollout.task) >> rollout.sample & 1:
                folder.append(made_up_result(rollout))


@cache
def whole() -> Path:
    """A folder with every rollout, made once."""
    path = Path(mkdtemp())
    fill(path)
    return path


@pytest.fixture(autouse=True, scope="module")
def _swept() -> Iterator[None]:
    yield
    shutil.rmtree(whole())


def files(path: Path) -> list[Path]:
    return sorted(path.glob("rollouts-*.tito"))


def names(path: Path) -> list[tuple[str, int]]:
    return [(entry.task, entry.sample) for entry in entries(path)]


def expect_each_once(path: Path) -> None:
    """Index and files hold every rollout once, each whole, and nothing else."""
    found = list(entries(path))
    expected = {
        (rollout.task.id, rollout.sample): rollout for rollout in rollouts(read_start(path / "index.jsonl").run)
    }
    assert sorted(names(path)) == sorted(expected)
    in_files: list[str] = []
    for file in files(path):
        with LedgerFile(file) as ledgers:
            in_files += ledgers.uuids
    assert sorted(in_files) == sorted(entry.ledger for entry in found)
    for entry, ledger in zip(found, collected(path), strict=True):
        expect_one(entry, ledger, made_up_result(expected[entry.task, entry.sample]).ledger)


def expect_one(entry: Entry, ledger: Ledger, made: Ledger) -> None:
    """A ledger equals the one that was made, except for its UUID, and the index agrees with it."""
    assert [turn.draft.columns.buffer for turn in ledger] == [turn.draft.columns.buffer for turn in made]
    assert ledger.annotations == made.annotations
    assert ledger.header.user == made.header.user
    assert (ledger.header.group_id, ledger.header.task_id) == (made.header.group_id, entry.task)
    assert entry.reward == ledger.annotation("reward")
    assert entry.termination == ledger.annotation("termination") == "completed"
    assert entry.turns == len(ledger)
    assert entry.sampled == sum(len(turn.draft.output_ids) for turn in ledger)
    assert entry.tokens == sum(turn.own_length for turn in ledger)


def test_a_folder_holds_what_it_was_given_in_several_files() -> None:
    assert len(files(whole())) > 3
    expect_each_once(whole())


@given(cut=st.data())
@settings(max_examples=10)
def test_a_kill_at_any_byte_loses_no_rollout_that_was_finished_and_repeats_none(cut: st.DataObject) -> None:
    """The index is cut anywhere; the file is cut anywhere between the last line's rollout and the end of the next."""
    with TemporaryDirectory() as folder:
        path = Path(shutil.copytree(whole(), Path(folder, "copy")))
        indexed = (path / "index.jsonl").read_bytes()
        first = indexed.index(b"\n") + 1
        at = cut.draw(st.integers(first, len(indexed)), label="bytes of the index")
        lines = indexed[:at].splitlines(keepends=True)[1:]
        torn = bool(lines) and not lines[-1].endswith(b"\n")
        finished = [msgspec.json.decode(line, type=Entry) for line in lines[: len(lines) - torn]]
        before = [encode(ledger) for ledger in list(collected(path))[: len(finished)]]
        being_written = list(entries(path))[len(finished) : len(finished) + 1]
        os.truncate(path / "index.jsonl", at)
        ends = {entry.file: entry.end for entry in finished}
        for file in files(path):
            end = ends.get(file.name, 0)
            if being_written and being_written[0].file == file.name:
                end = being_written[0].end if torn else cut.draw(st.integers(end, being_written[0].end), label="bytes")
            os.truncate(file, end)
            if not end:
                file.unlink()
        with RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES) as reopened:
            assert reopened.index.count == len(finished)
            assert list(entries(path)) == finished
        assert [encode(ledger) for ledger in collected(path)] == before
        fill(path)
        assert list(entries(path))[: len(finished)] == finished
        assert [encode(ledger) for ledger in collected(path)][: len(finished)] == before
        expect_each_once(path)


@given(cut=st.data())
@settings(max_examples=10)
def test_after_a_power_cut_what_is_left_is_whole_and_the_rest_is_run_again(cut: st.DataObject) -> None:
    """Index and last file each lose any part that was not flushed, or have zeros in its place.

    The first 8 bytes of a file are flushed when it is created.
    """
    with TemporaryDirectory() as folder:
        path = Path(shutil.copytree(whole(), Path(folder, "copy")))
        indexed = list(entries(path))
        kept = cut.draw(st.integers(0, len(indexed)), label="lines")
        last = indexed[kept - 1].file if kept else "rollouts-00001.tito"
        lines = (path / "index.jsonl").read_bytes().splitlines(keepends=True)
        torn = cut.draw(st.integers(0, len(lines[kept + 1]) - 1 if kept < len(indexed) else 0), label="torn")
        zeros = bytes(cut.draw(st.sampled_from([0, 1, 300]), label="zeros"))
        tail = lines[kept + 1][:torn] if kept < len(indexed) else b""
        (path / "index.jsonl").write_bytes(b"".join(lines[: kept + 1]) + tail + zeros)
        for file in files(path):
            if file.name > last:
                file.unlink()
        data = (path / last).read_bytes()
        (path / last).write_bytes(data[: cut.draw(st.integers(8, len(data)), label="bytes")] + zeros)
        if (unnamed := rollouts_after(path / last, indexed[:kept])) > 1:  # the index lost more than the file
            before = contents(path)
            with pytest.raises(SchemaError, match=f"{unnamed} rollouts after byte .* `truncate -s") as refused:
                RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES)
            assert contents(path) == before
            subprocess.run(re.findall("`(.*)`", str(refused.value))[0], shell=True, check=True)
        with RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES) as reopened:
            assert reopened.index.count <= kept
            assert list(entries(path)) == indexed[: reopened.index.count]
            assert all(entry.file == last for entry in indexed[reopened.index.count : kept])
        assert [ledger.uuid for ledger in collected(path)] == [entry.ledger for entry in entries(path)]
        fill(path)
        expect_each_once(path)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom strands_tito.collect import RolloutFolder\n"
        f"folder = RolloutFolder({str(tmp_path)!r}, {ABOUT!r})\nprint('open', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(FolderError, match="Another process"):
            RolloutFolder(tmp_path, ABOUT)
        other.kill()
    RolloutFolder(tmp_path, ABOUT).close()


def test_a_folder_of_another_collection_is_refused_with_what_differs(tmp_path: Path) -> None:
    RolloutFolder(tmp_path, ABOUT).close()
    with pytest.raises(FolderError, match=r"\{'agent': 'tests:run'\}.*\{'agent': 'other:run'\}"):
        RolloutFolder(tmp_path, {**ABOUT, "agent": "other:run"})
    RolloutFolder(tmp_path, dict(reversed(ABOUT.items()))).close()


def test_a_task_that_was_another_one_is_refused() -> None:
    with TemporaryDirectory() as folder:
        path = Path(shutil.copytree(whole(), Path(folder, "copy")))
        (changed,) = Tasks.of([{"question": "What is 17?"}])
        with (
            RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES) as reopened,
            pytest.raises(TaskError, match="'line-1' has changed"),
        ):
            reopened.index.finished_samples(changed)


def contents(path: Path) -> dict[str, bytes]:
    """Every byte of the folder, except an incomplete last line of the index."""
    found = {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}
    return found | {"index.jsonl": found["index.jsonl"].rpartition(b"\n")[0]}


def rollouts_after(file: Path, named: list[Entry]) -> int:
    """Count the ledgers of a file, whole or begun, that come after all that are named."""
    with LedgerFile(file) as ledgers:
        uuids = ledgers.uuids
    known = {entry.ledger for entry in named}
    last = max((number for number, uuid in enumerate(uuids) if uuid in known), default=-1)
    return len(uuids) - 1 - last


def copy_of(path: Path) -> Path:
    return Path(shutil.copytree(whole(), path / "copy"))


def test_files_without_their_index_are_never_written_over(tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    (path / "index.jsonl").unlink()
    with pytest.raises(FolderError, match=r"no index\.jsonl: restore it"):
        RolloutFolder(path, ABOUT)
    with pytest.raises(SchemaError, match=r"no index\.jsonl"):
        list(collected(path))


def test_a_full_file_that_is_gone_or_shorter_is_told(tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    first = files(path)[0]
    size = first.stat().st_size
    os.truncate(first, size - 1)
    with pytest.raises(SchemaError, match=f"{size - 1} bytes.* up to byte {size}: restore"):
        RolloutFolder(path, ABOUT)
    files(path)[-1].unlink()
    os.truncate(first, size)
    first.unlink()
    with pytest.raises(SchemaError, match="0 bytes"):
        RolloutFolder(path, ABOUT)


def reindex(path: Path, lines: list[bytes]) -> None:
    (path / "index.jsonl").write_bytes(b"".join(lines))


def index_lines(path: Path) -> list[bytes]:
    return (path / "index.jsonl").read_bytes().splitlines(keepends=True)


@given(order=st.permutations(range(len(TASKS) * SAMPLES)))
@settings(max_examples=8)
def test_an_index_in_another_order_loses_nothing(order: list[int]) -> None:
    with TemporaryDirectory() as folder:
        path = copy_of(Path(folder))
        start, *lines = index_lines(path)
        reindex(path, [start, *(lines[number] for number in order)])
        before = contents(path)
        with RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES) as reopened:
            assert reopened.index.count == len(lines)
        assert contents(path) == before
        expect_each_once(path)


def expect_refused_unchanged(path: Path, pattern: str) -> None:
    before = contents(path)
    with pytest.raises(SchemaError, match=pattern):
        RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES)
    assert contents(path) == before


@pytest.mark.parametrize("file_bytes", [FILE_BYTES, 1 << 20])
def test_rollouts_that_the_index_does_not_name_are_kept(tmp_path: Path, file_bytes: int) -> None:
    path = tmp_path / "folder"
    with RolloutFolder(path, ABOUT, file_bytes=file_bytes) as folder:
        for rollout in rollouts(folder.index.run):
            folder.append(made_up_result(rollout))
    start, *lines = index_lines(path)
    reindex(path, [start])
    expect_refused_unchanged(path, r"index\.jsonl does not name.*restore index\.jsonl from a copy")
    reindex(path, [start, *lines])
    shutil.copy(files(path)[0], path / "rollouts-00099.tito")
    expect_refused_unchanged(path, r"index\.jsonl does not name")


@given(data=st.data())
@settings(max_examples=8)
def test_ends_that_the_files_do_not_have_change_nothing(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = copy_of(Path(folder))
        newest = files(path)[-1].name.encode()
        start, *lines = index_lines(path)
        number = data.draw(st.sampled_from([at for at, line in enumerate(lines) if newest in line]))
        entry = msgspec.json.decode(lines[number], type=Entry)
        end = data.draw(st.integers(0, 10 * entry.end).filter(lambda end: end != entry.end))
        lines[number] = msgspec.json.encode(replace(entry, end=end)) + b"\n"
        reindex(path, [start, *lines])
        expect_refused_unchanged(path, f"ends at byte {end} of {newest.decode()}")


def test_a_file_that_is_none_of_the_collection_stays(tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    shutil.copy(files(path)[0], path / "rollouts-copy.tito")
    before = contents(path)
    RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES).close()
    assert contents(path) == before


def test_an_index_that_is_damaged_newer_or_none_is_told(tmp_path: Path) -> None:
    path = copy_of(tmp_path)
    index = path / "index.jsonl"
    indexed = index.read_bytes()
    lines = indexed.splitlines(keepends=True)
    index.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[3:]]))
    with pytest.raises(SchemaError, match="damaged in line 4"):
        RolloutFolder(path, ABOUT)
    index.write_bytes(indexed + lines[2])
    with pytest.raises(SchemaError, match="twice"):
        RolloutFolder(path, ABOUT)
    with pytest.raises(SchemaError, match="twice"):
        list(collected(path))
    index.write_bytes(indexed.replace(b'"schema":1', b'"schema":2', 1))
    with pytest.raises(SchemaError, match=r"schema 2.*schema 1.*[Uu]pgrade"):
        RolloutFolder(path, ABOUT)
    index.write_bytes(b"17\n")
    with pytest.raises(SchemaError, match=r"index\.jsonl is not an index"):
        list(collected(path))


def test_what_is_annotated_while_a_rollout_is_written_is_in_neither_file_nor_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = LedgerFile.append

    def append_while_a_judge_is_late(self: LedgerFile, ledger: Ledger) -> None:
        append(self, ledger)
        result.ledger.annotate("reward", 2.0)

    monkeypatch.setattr(LedgerFile, "append", append_while_a_judge_is_late)
    with RolloutFolder(tmp_path, ABOUT) as folder:
        result = made_up_result(rollouts(folder.index.run)[0])
        result.ledger.annotate("reward", 1.0)
        assert folder.append(result).reward == 1.0
    assert [ledger.annotation("reward") for ledger in collected(tmp_path)] == [1.0]


def test_a_termination_that_the_ledger_got_later_is_replaced_by_the_results(tmp_path: Path) -> None:
    with RolloutFolder(tmp_path, ABOUT) as folder:
        result = made_up_result(rollouts(folder.index.run)[0])
        result.ledger.annotate("termination", ["judged"])
        assert folder.append(result).termination == "completed"
    assert [ledger.annotation("termination") for ledger in collected(tmp_path)] == ["completed"]


def test_a_failure_is_logged_in_a_line_of_its_own_also_after_one_that_a_crash_cut(tmp_path: Path) -> None:
    with RolloutFolder(tmp_path, ABOUT) as folder:
        rollout = random.Random(1).choice(rollouts(folder.index.run))
        folder.log_failure(made_up_result(rollout, "one"))
        os.truncate(tmp_path / "failures.jsonl", 30)
        folder.log_failure(made_up_result(rollout, "two"))
        folder.log_failure(made_up_result(rollout, "ServerError: the engine is gone"))
    _, *whole = (tmp_path / "failures.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line) for line in whole] == [
        {
            "task": rollout.task.id, "sample": rollout.sample, "termination": "engine_error", "error": error,
            "traceback": "",
        }
        for error in ("two", "ServerError: the engine is gone")
    ]  # fmt: skip
    assert list(entries(tmp_path)) == []
