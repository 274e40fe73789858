"""A folder of rollouts has each rollout once or not at all after a kill or a power cut at any moment."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.plain_file import HEAD, PREAMBLE, frames_of
from strands_tito.collect import Entry, FolderError, Rollout, RolloutFolder, TaskError, Tasks, collected, entries
from support.made_up import made_up_result
from tito_core import store
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile, SchemaError, encode

ABOUT = {"agent": "tests:run", "sampling": {"temperature": 0.5}}
TASKS = Tasks.of([{"question": f"What is {number}?"} for number in range(7)])
SAMPLES = 2
FILE_BYTES = 4_000
"""Small, so that rollouts fill several files."""
END = 5
OLD = Path(__file__).parent / "folder_of_schema_1"
"""Two rollouts of each of three tasks, written before folders had END records."""
OLD_TASKS = Tasks.of([{"question": f"What is {number}?"} for number in range(3)])


def opened(path: Path) -> RolloutFolder:
    return RolloutFolder(path, ABOUT, file_bytes=FILE_BYTES)


def rollouts(run: str) -> list[Rollout]:
    return [Rollout(run, task, sample) for task in TASKS for sample in range(SAMPLES)]


def fill(path: Path) -> None:
    """Add every rollout that is missing."""
    with opened(path) as folder:
        for rollout in rollouts(folder.run):
            if not folder.finished_samples(rollout.task) >> rollout.sample & 1:
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


def copy_of(source: Path, path: Path) -> Path:
    return Path(shutil.copytree(source, path / "copy"))


def files(path: Path) -> list[Path]:
    return sorted(path.glob("rollouts-*.tito"))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


def expect_each_once(path: Path, expected: list[Rollout]) -> None:
    """The files hold every rollout once, each whole, and nothing else."""
    found = list(entries(path))
    made = {(rollout.task.id, rollout.sample): made_up_result(rollout).ledger for rollout in expected}
    assert sorted((entry.task, entry.sample) for entry in found) == sorted(made)
    in_files: list[str] = []
    for file in files(path):
        with LedgerFile(file) as ledgers:
            in_files += ledgers.uuids
    assert sorted(in_files) == sorted(entry.ledger for entry in found)
    for entry, ledger in zip(found, collected(path), strict=True):
        expect_one(entry, ledger, made[entry.task, entry.sample])


def expect_one(entry: Entry, ledger: Ledger, made: Ledger) -> None:
    """A ledger equals the one that was made, except for its UUID, and its facts are true."""
    assert [turn.draft.columns.buffer for turn in ledger] == [turn.draft.columns.buffer for turn in made]
    assert ledger.annotations == made.annotations
    assert ledger.header.user == made.header.user
    assert (ledger.header.group_id, ledger.header.task_id) == (made.header.group_id, entry.task)
    assert entry.reward == ledger.annotation("reward")
    assert entry.termination == ledger.annotation("termination") == "completed"
    assert entry.turns == len(ledger)
    assert entry.sampled == sum(len(turn.draft.output_ids) for turn in ledger)
    assert entry.tokens == sum(turn.own_length for turn in ledger)


def run_of(path: Path) -> str:
    return str(next(collected(path)).header.user["run"])


def ends_in(data: bytes) -> int:
    """Count the END records of a file that was cut, by the referee's reader."""
    at = PREAMBLE
    while at + HEAD.size <= len(data) and at + HEAD.size + HEAD.unpack_from(data, at)[0] <= len(data):
        at += HEAD.size + HEAD.unpack_from(data, at)[0]
    return sum(frame.kind == END for frame in frames_of(data[:at]))


def test_a_folder_holds_what_it_was_given_in_several_files_and_adds_nothing_to_full_ones(tmp_path: Path) -> None:
    assert len(files(whole())) > 3
    expect_each_once(whole(), rollouts(run_of(whole())))
    path = copy_of(whole(), tmp_path)
    with RolloutFolder(path, ABOUT, file_bytes=1) as again:
        added = [again.append(made_up_result(Rollout(again.run, task, SAMPLES))) for task in list(TASKS)[:2]]
    assert [entry.file for entry in added] == [f"rollouts-{len(files(whole())) + n:05d}.tito" for n in (1, 2)]


@given(cut=st.data())
@settings(max_examples=25)
def test_what_was_finished_at_any_byte_stays_and_the_rest_is_run_again(cut: st.DataObject) -> None:
    """A kill or a power cut ends the newest file anywhere, the latter perhaps with zeros after it."""
    with TemporaryDirectory() as folder:
        path, run = copy_of(whole(), Path(folder)), run_of(whole())
        number = cut.draw(st.integers(0, len(files(path)) - 1), label="file")
        for file in files(path)[number + 1 :]:
            file.unlink()
        newest = files(path)[-1]
        data = newest.read_bytes()
        data = data[: cut.draw(st.integers(0, len(data)), label="bytes")]
        zeros = cut.draw(st.sampled_from([0, 4096]), label="zeros") if len(data) >= PREAMBLE else 0
        newest.write_bytes(data + bytes(zeros))
        before = [*entries(whole())]
        finished = sum(ends_in(file.read_bytes()) for file in files(path)[:-1]) + ends_in(data)
        with opened(path):
            kept = [*entries(path)]
            assert kept == before[: len(kept)]
            assert len(kept) == finished or (zeros and len(kept) == finished + 1), "zeros were the record's own"
        assert [encode(ledger) for ledger in collected(path)] == [
            encode(ledger) for ledger in [*collected(whole())][: len(kept)]
        ]
        fill(path)
        assert [*entries(path)][: len(kept)] == kept
        expect_each_once(path, rollouts(run))


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
        (changed,) = Tasks.of([{"question": "What is 17?"}])
        with opened(copy_of(whole(), Path(folder))) as again, pytest.raises(TaskError, match="'line-1' has changed"):
            again.finished_samples(changed)


def test_files_of_no_collection_are_never_written_over(tmp_path: Path) -> None:
    path = copy_of(whole(), tmp_path)
    (path / "collection.json").unlink()
    before = contents(path)
    with pytest.raises(FolderError, match=r"no collection\.json: restore it"):
        opened(path)
    with pytest.raises(SchemaError, match=r"no collection\.json"):
        list(collected(path))
    assert contents(path) == before


def test_several_ledgers_that_somebody_added_are_not_cut_off(tmp_path: Path) -> None:
    path = copy_of(whole(), tmp_path)
    newest = files(path)[-1]
    store.append(newest, [Ledger(), Ledger()])
    before = contents(path)
    with pytest.raises(SchemaError, match=r"2 unfinished rollouts after byte .* `truncate -s") as refused:
        opened(path)
    assert contents(path) == before
    subprocess.run(re.findall("`(.*)`", str(refused.value))[0], shell=True, check=True)
    opened(path).close()
    assert contents(path) == contents(whole())


def test_a_file_that_is_none_of_the_collection_stays_and_one_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = copy_of(whole(), tmp_path)
    shutil.copy(files(path)[0], path / "rollouts-copy.tito")
    before = contents(path)
    opened(path).close()
    assert contents(path) == before
    shutil.copy(files(path)[0], path / "rollouts-00099.tito")
    for use in (lambda: opened(path), lambda: list(collected(path))):
        with pytest.raises(SchemaError, match="has sample 0 of task 'line-1' twice"):
            use()
    with opened(copy_of(whole(), tmp_path / "other")) as again, pytest.raises(SchemaError, match="twice"):
        again.append(made_up_result(rollouts(again.run)[0]))


def test_a_reward_that_is_annotated_later_is_the_rollouts_and_cuts_nothing(tmp_path: Path) -> None:
    path = copy_of(whole(), tmp_path)
    for number, file in ((0, files(path)[0]), (-1, files(path)[-1])):
        (late,) = [ledger for ledger in collected(path) if ledger.uuid == list(entries(path))[number].ledger]
        late.annotate("reward", 17.0)
        late.annotate("reward", 3.0, turn=0) if len(late) else None
        late.annotate("note", "a judge came late")
        store.append(file, [late])
    with opened(path) as again:
        again.append(made_up_result(Rollout(again.run, next(iter(TASKS)), SAMPLES)))
    before, after = list(entries(whole())), list(entries(path))
    assert [entry.reward for entry in after[:-1]] == [17.0, *(entry.reward for entry in before[1:-1]), 17.0]
    assert [ledger.annotation("reward") for ledger in collected(path)] == [entry.reward for entry in after]


def test_a_folder_of_schema_1_is_read_as_it_is_and_continued_without_its_index(tmp_path: Path) -> None:
    path = copy_of(OLD, tmp_path)
    index, run = (path / "index.jsonl").read_bytes(), run_of(OLD)
    expected = [Rollout(run, task, sample) for task in OLD_TASKS for sample in range(SAMPLES)]
    before = list(entries(path)), [encode(ledger) for ledger in collected(path)]
    expect_each_once(path, expected)
    assert contents(path) == contents(OLD)
    for _ in range(2):
        with RolloutFolder(path, {"agent": "tests:run"}) as folder:
            assert folder.run == run
            assert all(folder.finished_samples(task) == 3 for task in OLD_TASKS)
        assert "index.jsonl" not in contents(path)
        assert (list(entries(path)), [encode(ledger) for ledger in collected(path)]) == before
        (path / "index.jsonl").write_bytes(index)  # a crash before it was removed
    with pytest.raises(FolderError, match="another collection"):
        RolloutFolder(copy_of(OLD, tmp_path / "other"), ABOUT)


def test_a_rollout_of_schema_1_without_a_line_is_cut_off_and_several_are_kept(tmp_path: Path) -> None:
    path = copy_of(OLD, tmp_path)
    lines = (path / "index.jsonl").read_bytes().splitlines(keepends=True)
    (path / "index.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:9])
    with RolloutFolder(path, {"agent": "tests:run"}) as folder:
        folder.append(made_up_result(Rollout(folder.run, list(OLD_TASKS)[-1], 1)))
    assert len(list(entries(path))) == len(lines) - 1
    path = copy_of(OLD, tmp_path / "cut")
    os.truncate(files(path)[-1], PREAMBLE)  # a power cut may keep the line and take the rollout
    with RolloutFolder(path, {"agent": "tests:run"}) as folder:
        assert [folder.finished_samples(task) for task in OLD_TASKS] == [3, 3, 1]
    path = copy_of(OLD, tmp_path / "other")
    (path / "index.jsonl").write_bytes(lines[0])
    before = {name: data for name, data in contents(path).items() if name.endswith(".tito")}
    with pytest.raises(SchemaError, match="2 unfinished rollouts"):
        RolloutFolder(path, {"agent": "tests:run"})
    assert before.items() <= contents(path).items()


def test_a_folder_of_schema_1_shows_and_keeps_what_its_ledgers_hold(tmp_path: Path) -> None:
    path = copy_of(OLD, tmp_path)
    first, *_, last = entries(path)
    (judged,) = [ledger for ledger in collected(path) if ledger.uuid == first.ledger]
    judged.annotate("reward", 17.0)
    store.append(path / first.file, [judged])
    assert next(entries(path)).reward == 17.0
    data = (path / last.file).read_bytes()
    (path / last.file).write_bytes(data[: -len(frames_of(data)[-1].written())])  # a power cut took its termination
    with RolloutFolder(path, {"agent": "tests:run"}) as folder:
        assert [folder.finished_samples(task) for task in OLD_TASKS] == [3, 3, 1]
    assert next(entries(path)).reward == 17.0
    assert last.ledger not in [entry.ledger for entry in entries(path)]


def test_a_rollout_that_could_not_be_written_can_be_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        result = made_up_result(rollouts(folder.run)[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PREAMBLE + 100, hard))  # the kernel then cuts the write short
        try:
            with pytest.raises(OSError, match="File too large"):
                folder.append(result)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert folder.finished_samples(result.rollout.task) == 0
        assert [*entries(tmp_path)] == []
        assert [folder.append(result)] == [*entries(tmp_path)]


def test_what_is_annotated_while_a_rollout_is_written_is_in_neither_ledger_nor_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = LedgerFile.append

    def append_while_a_judge_is_late(self: LedgerFile, ledger: Ledger, end: bytes | None = None) -> None:
        result.ledger.annotate("reward", 2.0)
        append(self, ledger, end)

    monkeypatch.setattr(LedgerFile, "append", append_while_a_judge_is_late)
    with RolloutFolder(tmp_path, ABOUT) as folder:
        result = made_up_result(rollouts(folder.run)[0])
        result.ledger.annotate("reward", 1.0)
        assert folder.append(result).reward == 1.0
    assert [ledger.annotation("reward") for ledger in collected(tmp_path)] == [1.0]


@pytest.mark.parametrize("other", [["judged"], None], ids=["another", "none"])
def test_the_results_termination_is_always_written(tmp_path: Path, other: object) -> None:
    with RolloutFolder(tmp_path, ABOUT) as folder:
        result = made_up_result(rollouts(folder.run)[0])
        result.ledger.annotate("termination", other)
        assert folder.append(result).termination == "completed"
    assert [ledger.annotation("termination") for ledger in collected(tmp_path)] == ["completed"]


def test_a_failure_is_logged_in_a_line_of_its_own_also_after_one_that_a_crash_cut(tmp_path: Path) -> None:
    with RolloutFolder(tmp_path, ABOUT) as folder:
        rollout = random.Random(1).choice(rollouts(folder.run))
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
