"""A folder of rollouts: files of ledgers, in which an END record with the facts of a rollout follows its ledger.

A rollout is finished when its END record is whole. When the folder is opened again, what a crash left of a rollout
without one is cut off, so that each rollout is in the folder once or not at all.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
from filelock import FileLock, Timeout

from strands_tito.collect.rollout import FolderError, RolloutResult, Task, TaskError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import REWARD, Annotation
from tito_core.store import LedgerFile, SchemaError
from tito_core.store.frames import PREAMBLE, Kind, expect_preamble, frames, uuid_bytes
from tito_core.store.records import UNREADABLE
from tito_core.termination import ANNOTATION

NAME = "collection.json"
OLD_INDEX = "index.jsonl"
"""A folder of schema 1 has this instead of `NAME` and END records: the same object, then a line for each rollout."""
FORMAT = "strands-tito/collect"
SCHEMA = 2
FAILURES = "failures.jsonl"
FILE_BYTES = 128 << 20
"""A file of this size or more takes no further rollouts."""
MAX_SAMPLES = 1 << 16
"""Maximum number of rollouts of one task. Memory holds one bit for each sample up to the highest: at most 8 KiB."""
_FILE = re.compile(r"rollouts-(\d{5,9})\.tito")
_DIGEST_BITS = 64
_ANNOTATED: Mapping[str, Any] = {REWARD: float | None, ANNOTATION: str}
"""Types of the annotations that are facts under their names."""
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts of a finished rollout.

    Attributes:
        task: Id of the task.
        sample: Number within the task's group, from 0.
        digest: Digest of the task.
        termination: Why the rollout ended.
        turns: Number of turns.
        tokens: Number of tokens of the ledger, each counted once.
        sampled: Number of sampled tokens.
        reward: The reward, or None.
        ledger: UUID of the ledger.
        file: Name of the file that holds the ledger.
    """

    task: str
    sample: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SAMPLES)]
    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    termination: str
    turns: _Count
    tokens: _Count
    sampled: _Count
    reward: float | None = None
    ledger: str = ""
    file: str = ""

    @classmethod
    def of(cls, result: RolloutResult) -> Self:
        """Return the facts of a rollout, still without `ledger` and `file`: those are the record's place."""
        rollout, turns, reward = result.rollout, list(result.ledger), result.ledger.annotation(REWARD)
        return cls(
            task=rollout.task.id,
            sample=rollout.sample,
            digest=rollout.task.digest,
            termination=result.termination.value,
            turns=len(turns),
            tokens=sum(turn.own_length for turn in turns),
            sampled=sum(turn.draft.columns.output for turn in turns),
            reward=reward if isinstance(reward, float) else None,
        )

    def is_of(self, ledger: Ledger) -> bool:
        """Return whether a ledger is whole: what a rollout writes last is its termination."""
        return (self.turns, self.termination) == (len(ledger), ledger.annotation(ANNOTATION))

    def at(self, ledger: str, file: str) -> Self:
        """Return the facts with their place."""
        return msgspec.structs.replace(self, ledger=ledger, file=file)

    def record(self) -> bytes:
        """Return the payload of the END record, without the place."""
        return msgspec.msgpack.encode(self.at("", ""))


class RolloutFolder:
    """A folder open for writing. One process at a time writes rollouts to it; any number may read.

    Args:
        path: The folder; created if it does not exist.
        about: Description of the collection, as JSON.
        file_bytes: A file of this size or more takes no further rollouts.

    Attributes:
        run: UUID of the collection.

    Raises:
        FolderError: The folder cannot be created, another process writes to it, or it holds another collection or
            files of none.
        SchemaError: A file is damaged or has a newer schema.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any], *, file_bytes: int = FILE_BYTES) -> None:
        self.path = Path(path)
        _make(self.path)
        self._file_bytes = file_bytes
        self._file: LedgerFile | None = None
        self._finished: dict[bytes, int] = {}
        self._writing = threading.Lock()
        with ExitStack() as opened:
            self._lock(opened)
            self.run = _begin(self.path, about).run
            self._resume()
            self._exit_stack = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def finished_samples(self, task: Task) -> int:
        """Return a task's finished samples as a bit mask: bit 3 is sample 3.

        Raises:
            TaskError: The task's content differs from that of the rollouts in the folder.
        """
        known = self._finished.get(_key(task.id))
        if known is None:
            return 0
        if known & ((1 << _DIGEST_BITS) - 1) != int(task.digest, 16):
            raise TaskError(
                f"Task {task.id!r} has changed since its rollouts in {self.path} were collected. Give it a new "
                "id, or choose another folder. A task without an id is identified by its line number."
            )
        return known >> _DIGEST_BITS

    def append(self, result: RolloutResult) -> Entry:
        """Write a finished rollout, as its ledger is now. Thread-safe.

        After this returns, the rollout survives a crash of the process.

        Raises:
            OSError: The rollout could not be written; the file is unchanged.
            SchemaError: The folder has this sample of the task.
        """
        with self._writing:
            result = result.settled()
            entry = Entry.of(result)
            key, samples = _with(self._finished, entry, self.path)
            if self._file is None:
                self._number += 1
                self._file = LedgerFile(self.path / f"rollouts-{self._number:05d}.tito", "a")
                self._file.sync()  # so that a power cut leaves a file with our preamble
                _sync(self.path)
            self._file.append(result.ledger, entry.record())
            self._finished[key] = samples
            entry = entry.at(result.ledger.uuid, self._file.path.name)
            if self._file.end >= self._file_bytes:
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
        with self._writing, (self.path / FAILURES).open("a+b", buffering=0) as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0, end - 1))
            torn = log.read(1) not in (b"", b"\n")  # a crash cut the last line: begin a new one
            log.write(b"\n" * torn + msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        """Flush everything to disk and release the folder. Waits for a rollout that is being written."""
        with self._writing, self._exit_stack:
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

    def _resume(self) -> None:
        """Read what is finished, cut off what a crash left, and open the newest file if it has room."""
        if (self.path / OLD_INDEX).exists():
            _adopt(self.path)
        files = files_of(self.path)
        self._number = int(files[-1].stem.rpartition("-")[2]) if files else 0
        newest: list[str] = []
        for path in files:
            newest = []
            for entry in entries_in(path):
                self._finished.update([_with(self._finished, entry, self.path)])
                newest.append(entry.ledger)
        if files:
            _cut_unfinished(files[-1], newest)
            if files[-1].stat().st_size < self._file_bytes:
                self._file = LedgerFile(files[-1], "a")


def collected(folder: str | os.PathLike[str]) -> Iterator[Ledger]:
    """Yield the ledgers of a folder's finished rollouts, in the order in which they ended, one in memory at a time.

    Works during a running collection too, without the rollouts that end later.

    Raises:
        SchemaError: This is not a folder of rollouts, or it is damaged.
        LawViolationError: A ledger breaks a law.
    """
    for name, of in groupby(entries(folder), key=lambda entry: entry.file):
        try:
            with LedgerFile(Path(folder) / name) as file:
                for entry in of:
                    yield file.load(entry.ledger)
        except (KeyError, FileNotFoundError) as error:
            raise SchemaError(
                f"{folder} lacks a ledger that was collected: {error}. Restore it from a copy."
            ) from error


def entries(folder: str | os.PathLike[str], sizes: dict[Path, int] | None = None) -> Iterator[Entry]:
    """Yield the facts of a folder's rollouts, in the order in which they ended; works during a collection too.

    Args:
        folder: The folder.
        sizes: Sizes of the files that were read before, to be updated: those that did not change are not read again.

    Raises:
        SchemaError: This is not a folder of rollouts, or it is damaged.
    """
    path = Path(folder)
    if read_start(path) is None:
        raise SchemaError(f"{folder} has no {NAME}: it is not a folder of collected rollouts.")
    finished: dict[bytes, int] = {}
    sizes = {} if sizes is None else sizes
    for file in files_of(path):
        if sizes.get(file) != (size := file.stat().st_size):
            sizes[file] = size
            for entry in entries_in(file):
                finished.update([_with(finished, entry, path)])
                yield entry


def entries_in(path: Path) -> list[Entry]:
    """Return a file's finished rollouts, in the order in which they ended, with the rewards that were annotated later.

    Raises:
        SchemaError: The file is damaged.
    """
    old = _old_entries(path.parent) if (path.parent / OLD_INDEX).exists() else ()
    found = {uuid_bytes(entry.ledger): entry for entry in old if entry.file == path.name}
    ended = set[bytes]()
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < len(PREAMBLE):  # a crash left it so
            return list(found.values())
        expect_preamble(file, path)
        for kind, ledger, offset, length in frames(file, len(PREAMBLE), path):
            if ledger in ended and kind is not Kind.ANNOTATION:  # `LedgerFile` writes none
                raise SchemaError(
                    f"{path}: the record at byte {offset} follows the END record of its rollout. Restore the file from "
                    "a copy."
                )
            if kind is Kind.END or (kind is Kind.ANNOTATION and ledger in found):
                payload = os.pread(file.fileno(), length, offset)
                try:
                    if kind is Kind.END:
                        entry = msgspec.msgpack.decode(payload, type=Entry)
                        found[ledger] = entry.at(str(uuid.UUID(bytes=ledger)), path.name)
                        ended.add(ledger)
                    else:
                        found[ledger] = _annotated(found[ledger], msgspec.msgpack.decode(payload, type=Annotation))
                except UNREADABLE as error:
                    raise SchemaError(
                        f"{path}: the record at byte {offset} cannot be read: {error}. Restore it from a copy."
                    ) from error
    return list(found.values())


def _annotated(entry: Entry, annotation: Annotation) -> Entry:
    """Return the facts after a later annotation."""
    if annotation.turn is None and isinstance(annotation.value, _ANNOTATED.get(annotation.name, ())):
        return msgspec.structs.replace(entry, **{annotation.name: annotation.value})
    return entry


def files_of(folder: Path) -> list[Path]:
    """Return a collection's files of rollouts, the oldest first."""
    return sorted(
        (path for path in folder.glob("rollouts-*.tito") if _FILE.fullmatch(path.name)),
        key=lambda path: (len(path.name), path.name),
    )


def expect_usable(path: Path) -> None:
    """Create a folder for rollouts if it does not exist, and check that its description can be read if it has one.

    Raises:
        FolderError: The folder cannot be created.
        SchemaError: The file with the description's name is none.
    """
    _make(path)
    read_start(path)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> FolderError:
    return FolderError(f"{path} cannot be used as a folder for rollouts: {error.strerror}. Choose another folder.")


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a folder says of its collection.

    Attributes:
        run: UUID of the collection.
        about: Description of the collection, as JSON. A collection that resumes it must have the same one.
    """

    format: str = FORMAT
    schema: int = SCHEMA
    run: str
    about: dict[str, Any] = field(default_factory=dict)


def read_start(folder: Path) -> Start | None:
    """Return what a folder says of its collection; None if it says nothing.

    Raises:
        SchemaError: It cannot be read, or has a newer schema.
    """
    path = next((folder / name for name in (NAME, OLD_INDEX) if (folder / name).exists()), None)
    if path is None:
        return None
    if not path.is_file():  # opening a named pipe would block
        raise SchemaError(f"{path} is not a file: choose another folder.")
    try:
        with path.open("rb") as lines:
            start = msgspec.json.decode(lines.readline(), type=Start)
    except OSError as error:
        raise SchemaError(f"{path} cannot be read: {error.strerror}.") from error
    except UNREADABLE as error:
        raise SchemaError(f"{path} does not describe a collection of rollouts: {error}.") from error
    if start.format != FORMAT or start.schema > SCHEMA:
        raise SchemaError(
            f"{path} has format {start.format!r}, schema {start.schema}; this version of strands-tito reads "
            f"{FORMAT!r}, up to schema {SCHEMA}. Upgrade strands-tito to read it."
        )
    return start


def _begin(folder: Path, about: Mapping[str, Any]) -> Start:
    """Return what a folder says of its collection, and write it if this is the first time.

    Raises:
        SchemaError: As `read_start`.
        FolderError: The folder belongs to another collection.
    """
    ours = Start(run=str(uuid.uuid4()), about=msgspec.json.decode(msgspec.json.encode(about)))
    start = read_start(folder)
    if start is None and files_of(folder):
        raise FolderError(f"{folder} holds rollouts but no {NAME}: restore it, or choose another folder.")
    start = start or ours
    if start.about != ours.about:
        differs = sorted(key for key in {*start.about, *ours.about} if start.about.get(key) != ours.about.get(key))
        theirs, own = ({key: value.get(key) for key in differs} for value in (start.about, ours.about))
        raise FolderError(
            f"{folder} holds another collection: it has {theirs}, this one has {own}. "
            "Use the same values to resume it, or choose another folder."
        )
    if not (folder / NAME).exists():
        new = folder / f"{NAME}.new"
        with new.open("wb") as file:
            file.write(msgspec.json.encode(replace(start, schema=SCHEMA)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / NAME)
    return start


def _with(finished: Mapping[bytes, int], entry: Entry, folder: Path) -> tuple[bytes, int]:
    """Return a task's key, and its finished samples with this one: 200 bytes for each task, a bit for each sample.

    Raises:
        SchemaError: The sample is already finished.
    """
    key, bit = _key(entry.task), 1 << (_DIGEST_BITS + entry.sample)
    known = finished.get(key, int(entry.digest, 16))
    if known & bit:
        raise SchemaError(
            f"{folder} has sample {entry.sample} of task {entry.task!r} twice: each sample is collected once. Remove "
            "the file that was added to the folder."
        )
    return key, known | bit


def _key(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=16).digest()


def _cut_unfinished(path: Path, finished: Collection[str]) -> None:
    """Cut off what a crash left of one rollout at the end of a file.

    Raises:
        SchemaError: Several ledgers without an END record follow the finished ones, which a crash cannot cause. Nothing
            was changed.
    """
    if path.stat().st_size < len(PREAMBLE):
        return
    known, end, begun = set(map(uuid_bytes, finished)), len(PREAMBLE), set[bytes]()
    with path.open("rb", buffering=0) as file:
        for frame in frames(file, len(PREAMBLE), path):
            if frame.uuid in known:
                end, begun = frame.offset + frame.length, set()
            else:
                begun.add(frame.uuid)
    if len(begun) > 1:
        raise SchemaError(
            f"{path} holds {len(begun)} unfinished rollouts after byte {end}; a crash leaves at most one. Nothing was "
            f"changed: choose another folder, or discard these rollouts with `truncate -s {end} {path}` to run them "
            "again."
        )
    os.truncate(path, end)


def _old_entries(folder: Path) -> Iterator[Entry]:
    """Yield the facts that the index of a folder of schema 1 holds.

    Raises:
        SchemaError: A line is damaged.
    """
    path = folder / OLD_INDEX
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1 or not line.endswith(b"\n"):  # a crash cut the last line
                continue
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except UNREADABLE as error:
                raise SchemaError(f"{path} is damaged in line {number}: {error}. Restore it from a copy.") from error
            yield entry


def _adopt(folder: Path) -> None:
    """Write the END records that a folder of schema 1 lacks, then remove its index."""
    for path in files_of(folder):
        with LedgerFile(path, "a") as file:
            held = [entry for entry in entries_in(path) if entry.ledger in file]
            whole = [entry for entry in held if entry.is_of(file.load(entry.ledger))]
        _cut_unfinished(path, [entry.ledger for entry in whole])  # a power cut may have taken the end of one
        with LedgerFile(path, "a") as file:
            for entry in whole:
                if not file.is_ended(entry.ledger):
                    file.append(file.load(entry.ledger), entry.record())
            file.sync()
    (folder / OLD_INDEX).unlink()
