"""A folder of rollouts: files of ledgers, and an index of the finished rollouts.

A finished rollout's ledger is appended to the newest file, then its line to the index. When the folder is opened
again, a ledger without a line is cut off, so that each rollout is in the folder once or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from filelock import FileLock, Timeout

from strands_tito.collect.entry import NAME, Entry, read_start
from strands_tito.collect.errors import FolderError
from strands_tito.collect.index import Index, entries
from strands_tito.collect.recovery import recover
from strands_tito.collect.rollout import RolloutResult
from tito_core.ledger.header import REWARD
from tito_core.ledger.ledger import Ledger
from tito_core.store import LedgerFile, SchemaError

FILE_BYTES = 128 << 20
"""A file of this size or more takes no further rollouts."""
FAILURES = "failures.jsonl"
_FILES = "rollouts-*.tito"


class RolloutFolder:
    """A folder open for writing. One process at a time writes to it; any number may read.

    Args:
        path: The folder; created if it does not exist.
        about: Description of the collection, as JSON.
        file_bytes: A file of this size or more takes no further rollouts.

    Attributes:
        index: The index of finished rollouts.

    Raises:
        FolderError: The folder cannot be created, another process writes to it, or it holds another collection or
            files without an index.
        SchemaError: The index or a file is damaged or has a newer schema, or the two do not agree.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any], *, file_bytes: int = FILE_BYTES) -> None:
        self.path = Path(path)
        _make(self.path)
        self._file_bytes = file_bytes
        self._file: LedgerFile | None = None
        self._index_failed = False
        with ExitStack() as opened:
            self._lock(opened)
            if not (self.path / NAME).exists() and next(self.path.glob(_FILES), None) is not None:
                raise FolderError(f"{self.path} holds rollouts but no {NAME}: restore it, or choose another folder.")
            self.index = Index(self.path / NAME, about)
            opened.callback(self.index.close)
            self._resume()
            self._exit_stack = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def append(self, result: RolloutResult) -> Entry:
        """Write a finished rollout. After this returns, the rollout survives a crash of the process.

        Raises:
            OSError: The rollout could not be written.
            FolderError: An earlier rollout could not be written.
        """
        if self._index_failed:
            raise FolderError(f"{self.path} takes no more rollouts: writing to its index failed. Run again to resume.")
        if self._file is None:
            self._file = LedgerFile(self.path / self.index.next_file, "a")
            self._file.sync()  # so that a power cut leaves a file with our preamble
            _sync(self.path)
        ledger, task = result.ledger, result.rollout.task
        self._file.append(ledger)
        end = self._file.path.stat().st_size
        turns = list(ledger)
        entry = Entry(
            task=task.id,
            sample=result.rollout.sample,
            digest=task.digest,
            ledger=ledger.uuid,
            file=self._file.path.name,
            end=end,
            termination=result.termination.value,
            reward=ledger.annotation(REWARD),
            turns=len(turns),
            tokens=sum(turn.own_length for turn in turns),
            sampled=sum(turn.draft.columns.output for turn in turns),
        )
        try:
            self.index.append(entry)
        except BaseException:
            self._index_failed = True  # recovery expects at most one ledger without a line
            raise
        if end >= self._file_bytes:
            self._seal()
        return entry

    def log_failure(self, result: RolloutResult) -> None:
        """Append a failed rollout to failures.jsonl."""
        rollout, failure = result.rollout, result.failure
        record = {
            "task": rollout.task.id,
            "sample": rollout.sample,
            "termination": result.termination.value,
            "error": failure.error if failure else "",
            "traceback": failure.traceback if failure else "",
        }
        with (self.path / FAILURES).open("ab") as log:
            log.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """Flush everything to disk and release the folder."""
        with self._exit_stack:
            self._seal()

    def _lock(self, opened: ExitStack) -> None:
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderError(
                f"Another process is collecting into {self.path}: wait for it, or choose another folder."
            ) from None
        except OSError as error:
            raise _unusable(self.path, error) from error
        opened.callback(lock.release)

    def _seal(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None
        self.index.sync()

    def _resume(self) -> None:
        """Remove what a crash left, and open the newest file if it has room."""
        recover(self.path, self.index)
        newest = self.index.newest
        if newest is not None and self.index.ends[newest] < self._file_bytes:
            self._file = LedgerFile(self.path / newest, "a")


def expect_usable(path: Path) -> None:
    """Create a folder for rollouts if it does not exist, and check the first line of its index if it has one.

    Raises:
        FolderError: The folder cannot be created.
        SchemaError: The file with the index's name is not an index.
    """
    _make(path)
    if (path / NAME).exists():
        read_start(path / NAME)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> FolderError:
    return FolderError(f"{path} cannot be used as a folder for rollouts: {error.strerror}. Choose another folder.")


def collected(folder: str | os.PathLike[str]) -> Iterator[Ledger]:
    """Yield the ledgers of a folder's finished rollouts, in the order in which they ended, one in memory at a time.

    Works during a running collection too, without the rollouts that end later.

    Raises:
        SchemaError: The folder has no index, or is damaged.
        LawViolationError: A ledger breaks a law.
    """
    file: LedgerFile | None = None
    try:
        for entry in entries(folder):
            if file is None or file.path.name != entry.file:
                if file is not None:
                    file.close()
                file = _open_file(Path(folder) / entry.file)
            if entry.ledger not in file:
                raise SchemaError(
                    f"{file.path} lacks ledger {entry.ledger}, which the index names: restore both from a copy."
                )
            yield file.load(entry.ledger)
    finally:
        if file is not None:
            file.close()


def _open_file(path: Path) -> LedgerFile:
    try:
        return LedgerFile(path)
    except FileNotFoundError as error:
        raise SchemaError(f"{path} is missing, but the index names it: restore it from a copy.") from error


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
