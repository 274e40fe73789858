"""A folder of rollouts: files of ledgers, and the index that says which rollouts are finished.

A rollout's ledger is appended to the last file, whole, and then its line to the index. What a crash left in the file
without a line is cut away when the folder is opened to go on, so that a rollout is there once or not at all.
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

from strands_tito.collect.agent import REWARD
from strands_tito.collect.entry import NAME, Entry, read_start
from strands_tito.collect.errors import FolderError
from strands_tito.collect.index import Index, entries
from strands_tito.collect.recovery import recover
from strands_tito.collect.rollout import Ended
from tito_core.ledger.ledger import Ledger
from tito_core.store import LedgerFile, SchemaError

FILE_BYTES = 128 << 20
"""Size from which on a file takes no more rollouts."""
FAILURES = "failures.jsonl"
_FILES = "rollouts-*.tito"


class RolloutFolder:
    """A folder that takes rollouts as they end. One process at a time writes to it; any may read.

    Args:
        path: The folder, made if need be.
        about: What is collected in it, as JSON.
        file_bytes: Size from which on a file takes no more rollouts.

    Attributes:
        index: Which rollouts are finished.

    Raises:
        FolderError: It cannot be made, another process writes to it, it holds another collection, or files without an
            index.
        SchemaError: Its index or a file is damaged, does not fit the other, or is newer than this version.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any], *, file_bytes: int = FILE_BYTES) -> None:
        self.path = Path(path)
        _make(self.path)
        self._file_bytes = file_bytes
        self._file: LedgerFile | None = None
        self._is_cut_off = False
        with ExitStack() as opened:
            self._lock(opened)
            if not (self.path / NAME).exists() and next(self.path.glob(_FILES), None) is not None:
                raise FolderError(f"{self.path} holds rollouts and no {NAME}: restore it, or choose another folder.")
            self.index = Index(self.path / NAME, about)
            opened.callback(self.index.close)
            self._go_on()
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def keep(self, ended: Ended) -> Entry:
        """Write a finished rollout; when this returns, it is there for good.

        Raises:
            OSError: It could not be written.
            FolderError: An earlier one could not.
        """
        if self._is_cut_off:
            raise FolderError(f"{self.path} takes no more rollouts: the index could not be written. Run again.")
        if self._file is None:
            self._file = LedgerFile(self.path / self.index.next_file, "a")
            self._file.sync()  # a power cut leaves at least a file that is one of ours
            _sync(self.path)
        ledger, task = ended.ledger, ended.rollout.task
        self._file.append(ledger)
        end = self._file.path.stat().st_size
        turns = list(ledger)
        entry = Entry(
            task=task.id,
            sample=ended.rollout.sample,
            digest=task.digest,
            ledger=ledger.uuid,
            file=self._file.path.name,
            end=end,
            termination=ended.termination.value,
            reward=_number(ledger.annotation(REWARD)),
            turns=len(turns),
            tokens=sum(turn.own_length for turn in turns),
            sampled=sum(turn.draft.columns.output for turn in turns),
        )
        try:
            self.index.append(entry)
        except BaseException:
            self._is_cut_off = True  # another one would be the second without a line, as no crash leaves them
            raise
        if end >= self._file_bytes:
            self._seal()
        return entry

    def fail(self, ended: Ended) -> None:
        """Write down why a rollout failed, in a log beside the rollouts."""
        rollout, failure = ended.rollout, ended.failure
        said = {
            "task": rollout.task.id,
            "sample": rollout.sample,
            "termination": ended.termination.value,
            "error": failure.error if failure else "",
            "traceback": failure.traceback if failure else "",
        }
        with (self.path / FAILURES).open("ab") as log:
            log.write(msgspec.json.encode(said) + b"\n")

    def close(self) -> None:
        """Wait until everything is on the disk, and let others write."""
        with self._opened:
            self._seal()

    def _lock(self, opened: ExitStack) -> None:
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FolderError(
                f"Another process collects into {self.path}: wait for it, or choose another folder."
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

    def _go_on(self) -> None:
        """Cut what a crash left, and open the newest file where it takes more."""
        recover(self.path, self.index)
        newest = self.index.newest
        if newest is not None and self.index.ends[newest] < self._file_bytes:
            self._file = LedgerFile(self.path / newest, "a")


def expect_usable(path: Path) -> None:
    """Make a folder for rollouts if need be, and check the first line of its index if it has one.

    Raises:
        FolderError: The folder cannot be made.
        SchemaError: What has the index's name is not an index.
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
    return FolderError(f"{path} cannot be used as the folder for rollouts: {error.strerror}. Choose another one.")


def collected(folder: str | os.PathLike[str]) -> Iterator[Ledger]:
    """Yield the ledgers of a folder's finished rollouts, one read at a time, in the order they ended.

    It may be called while a collection goes on there; those that end later are left out.

    Raises:
        SchemaError: It is no such folder, or damaged.
        LawViolationError: A ledger in it breaks a law.
    """
    file: LedgerFile | None = None
    try:
        for entry in entries(folder):
            if file is None or file.path.name != entry.file:
                if file is not None:
                    file.close()
                file = _opened(Path(folder) / entry.file)
            if entry.ledger not in file:
                raise SchemaError(
                    f"{file.path} has no ledger {entry.ledger}, which the index names: restore both from a copy."
                )
            yield file.load(entry.ledger)
    finally:
        if file is not None:
            file.close()


def _opened(path: Path) -> LedgerFile:
    try:
        return LedgerFile(path)
    except FileNotFoundError as error:
        raise SchemaError(f"{path} is missing, and the index names it: restore it from a copy.") from error


def _number(reward: Any) -> float | None:
    """Return a reward as exporters read it: a run may have annotated its ledger with anything."""
    return float(reward) if isinstance(reward, int | float) and not isinstance(reward, bool) else None


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
