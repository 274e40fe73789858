"""Writers of one file are killed at random moments: every committed turn is read back.

TITO_KILLS raises the number of kills and TITO_SEED chooses the moments (`make prove`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid as uuid_module
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

from support import crash_writer
from tito_core.ledger import Ledger, check_ledger
from tito_core.store import LedgerFile, read

KILLS = int(os.environ.get("TITO_KILLS", "6"))
SEED = int(os.environ.get("TITO_SEED", "0"))
WRITERS, LEDGERS = 3, 2


@dataclass
class Reported:
    """What one writer reported before it died.

    Attributes:
        turns: Turns committed, by ledger.
        notes: Annotations, by ledger.
        synced: Turns committed before its last fsync, by ledger.
        size: Size of the file at its last fsync, in bytes.
        syncs: Number of fsyncs.
    """

    turns: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    synced: dict[str, int] = field(default_factory=dict)
    size: int = 0
    syncs: int = 0

    def read(self, lines: str) -> Reported:
        for line in lines.splitlines(keepends=True):
            if line.endswith("\n"):  # the last line may be cut
                self._read_line(*line.split())
        return self

    def _read_line(self, record: str, *words: str) -> None:
        if record == "turn":
            self.turns[words[0]] = int(words[1]) + 1
        elif record == "note":
            self.notes[words[0]] = int(words[1]) + 1
        elif record == "sync":
            self.synced, self.size, self.syncs = dict(self.turns), int(words[0]), self.syncs + 1


class WriterProcess:
    """A process that forks writers and waits for them."""

    def __init__(self) -> None:
        python_path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, crash_writer.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": python_path},
        )

    def send(self, *words: object) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        return int(self.process.stdout.readline())

    @contextmanager
    def writer(self, path: Path, seed: int, uuids: list[str]) -> Iterator[tuple[int, TextIO]]:
        """Start a writer, yield its process id and pipe, and kill it in the end."""
        pipe = path.with_name(f"reports-{seed}")
        os.mkfifo(pipe)
        pid = self.send(path, pipe, seed, *uuids)
        try:
            with pipe.open() as reports:
                assert reports.readline() == "ready\n"
                yield pid, reports
        finally:
            os.kill(pid, signal.SIGKILL)  # the process id stays valid until it is waited for
            assert self.send("wait", pid) == -signal.SIGKILL
            pipe.unlink()


@pytest.fixture
def writers_process() -> Iterator[WriterProcess]:
    started = WriterProcess()
    with started.process as process:
        yield started
        assert process.stdin is not None
        process.stdin.close()


def kill_at_random_moments(writers: list[tuple[int, TextIO]], dice: random.Random) -> list[Reported]:
    """Kill the writers one after the other at random moments, and return what each reported."""
    for pid, _ in dice.sample(writers, len(writers)):
        time.sleep(dice.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
    return [Reported().read(pipe.read()) for _, pipe in writers]


def expect_chain(ledger: Ledger, at_least: int, at_most: int) -> None:
    """Assert that a ledger has its writer's turns, in order and unchanged, and none of the reported ones is missing."""
    check_ledger(ledger)
    assert at_least <= len(ledger) <= at_most
    for turn in ledger:
        expected = crash_writer.draft_of(ledger.uuid, turn.index, turn.path_length - turn.own_length)
        assert turn.draft.columns.buffer == expected.columns.buffer
        assert (turn.parent, turn.draft.fingerprint) == (expected.parent, expected.fingerprint)
        assert dict(turn.draft.sampling) == dict(expected.sampling)
        assert turn.draft.engine.versions == expected.engine.versions
    assert [note.value for note in ledger.annotations] == list(range(len(ledger.annotations)))


def expect_file(path: Path, turns: Mapping[str, int], notes: Mapping[str, int]) -> dict[str, Ledger]:
    """Assert that the file has the reported records, and at most one unreported record per writer and kind."""
    ledgers = {ledger.uuid: ledger for ledger in read(path)}
    for uuid in {*turns, *ledgers}:
        expect_chain(ledgers[uuid], turns.get(uuid, 0), turns.get(uuid, 0) + 1)
        assert notes.get(uuid, 0) <= len(ledgers[uuid].annotations) <= notes.get(uuid, 0) + 1
    return ledgers


def expect_after_a_power_cut(path: Path, reports: list[Reported], dice: random.Random) -> None:
    """Assert that a file that lost bytes after the last fsync, or has zeros there, still has everything before it."""
    whole = path.read_bytes()
    synced = max(report.size for report in reports)
    if not synced:
        return
    kept = dice.randint(synced, len(whole))
    zeros = dice.choice([0, dice.randint(1, 5_000)])
    copy = path.with_suffix(".cut")
    copy.write_bytes(whole[:kept] + bytes(zeros))
    ledgers = {ledger.uuid: ledger for ledger in read(copy)}
    for report in reports:
        for uuid, turns in report.synced.items():
            expect_chain(ledgers[uuid], turns, 1 << 30)
    with LedgerFile(copy, "a") as file:
        for ledger in ledgers.values():
            crash_writer.commit_next(file.attach(ledger))
    assert {ledger.uuid: len(ledger) for ledger in read(copy)} == {uuid: len(ledgers[uuid]) for uuid in ledgers}


@pytest.mark.timeout(0)
def test_a_killed_writer_loses_no_committed_turn(tmp_path: Path, writers_process: WriterProcess) -> None:
    dice = random.Random(SEED)
    path = tmp_path / "rollouts.tito"
    kills = syncs = torn = 0
    turns: dict[str, int] = {}
    notes: dict[str, int] = {}
    uuids = [[_uuid(dice) for _ in range(LEDGERS)] for _ in range(WRITERS)]
    while kills < KILLS:
        if kills % (4 * WRITERS) == 0:  # else continue the ledgers and the file of killed writers
            uuids, turns, notes = [[_uuid(dice) for _ in range(LEDGERS)] for _ in range(WRITERS)], {}, {}
            path.unlink(missing_ok=True)
        with ExitStack() as stack:
            seeds = [(dice.getrandbits(32), own) for own in uuids[: KILLS - kills]]
            writers = [stack.enter_context(writers_process.writer(path, *own)) for own in seeds]
            reports = kill_at_random_moments(writers, dice)
        for report in reports:
            turns |= report.turns
            notes |= report.notes
            syncs += report.syncs
        size = path.stat().st_size
        ledgers = expect_file(path, turns, notes)
        expect_after_a_power_cut(path, reports, dice)
        with LedgerFile(path, "a") as file:  # cuts off a torn tail
            torn += path.stat().st_size < size
            for uuid, ledger in ledgers.items():
                crash_writer.commit_next(file.attach(ledger))
                turns[uuid], notes[uuid] = len(ledger), len(ledger.annotations)
        expect_file(path, turns, notes)
        kills += len(writers)
    print(f"\n{kills} kills of writers, {syncs} fsyncs, {torn} torn tails")


def _uuid(dice: random.Random) -> str:
    return str(uuid_module.UUID(int=dice.getrandbits(128), version=4))
