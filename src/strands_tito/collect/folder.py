"""A folder of rollouts: files of ledgers, and an index of the finished rollouts.

A finished rollout's ledger is appended to the newest file, then its line to the index. When the folder is opened
again, a ledger without a line is cut off, so that each rollout is in the folder once or not at all.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from filelock import FileLock, Timeout

from strands_tito.collect.rollout import FolderError, RolloutResult, Task, TaskError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import REWARD
from tito_core.store import LedgerFile, SchemaError
from tito_core.store.frames import PREAMBLE, expect_preamble, frames, uuid_bytes
from tito_core.store.records import UNREADABLE
from tito_core.termination import ANNOTATION

NAME = "index.jsonl"
FORMAT = "strands-tito/collect"
SCHEMA = 1
FAILURES = "failures.jsonl"
FILE_BYTES = 128 << 20
"""A file of this size or more takes no further rollouts."""
MAX_SAMPLES = 1 << 16
"""Maximum number of rollouts of one task. The index keeps one bit for each sample up to the highest: at most 8 KiB
for a line."""
_FILES = "rollouts-*.tito"
_DIGEST = re.compile("[0-9a-f]{16}")
_FILE = re.compile(r"rollouts-(\d{5,9})\.tito")
_DIGEST_BITS = 64
_ENCODER = msgspec.json.Encoder()


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
        self._writing = threading.Lock()
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
        """Write a finished rollout, as its ledger is now. Thread-safe.

        After this returns, the rollout survives a crash of the process.

        Raises:
            OSError: The rollout could not be written.
            FolderError: An earlier rollout could not be written.
        """
        with self._writing:
            return self._append(result.settled())

    def _append(self, result: RolloutResult) -> Entry:
        if self._index_failed:
            raise FolderError(f"{self.path} takes no more rollouts: writing to its index failed. Run again to resume.")
        if self._file is None:
            self._file = LedgerFile(self.path / self.index.next_file, "a")
            self._file.sync()  # so that a power cut leaves a file with our preamble
            _sync(self.path)
        ledger, task = result.ledger, result.rollout.task
        self._file.append(ledger)
        end = self._file.end
        rollout = {"task": task.id, "sample": result.rollout.sample, "digest": task.digest}
        facts = {**facts_of(ledger), **rollout, "termination": result.termination.value}
        entry = Entry(file=self._file.path.name, end=end, **facts)
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
        self.index.sync()

    def _resume(self) -> None:
        """Remove what a crash left, and open the newest file if it has room."""
        recover(self.path, self.index)
        newest = self.index.newest
        if newest is not None and self.index.ends[newest] < self._file_bytes:
            self._file = LedgerFile(self.path / newest, "a")


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
            ledger = file.load(entry.ledger)
            expect_true(entry, ledger, Path(folder))
            yield ledger
    finally:
        if file is not None:
            file.close()


def _open_file(path: Path) -> LedgerFile:
    try:
        return LedgerFile(path)
    except FileNotFoundError as error:
        raise SchemaError(f"{path} is missing, but the index names it: restore it from a copy.") from error


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


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished rollout: a line of the index.

    Attributes:
        task: Id of the task.
        sample: Number within the task's group, from 0.
        digest: Digest of the task.
        ledger: UUID of the ledger.
        file: Name of the file that holds the ledger, in the index's folder.
        end: Offset in bytes where the ledger's last record ends in that file.
        termination: Why the rollout ended.
        reward: The reward, or None.
        turns: Number of turns.
        tokens: Number of tokens of the ledger, each counted once.
        sampled: Number of sampled tokens.
    """

    task: str
    sample: int
    digest: str
    ledger: str
    file: str
    end: int
    termination: str
    reward: float | None
    turns: int
    tokens: int
    sampled: int

    def __post_init__(self) -> None:
        """Check the values: a hostile line must not name files outside the folder or make large allocations.

        Raises:
            ValueError: A value is out of range.
        """
        if not 0 <= self.sample < MAX_SAMPLES:
            raise ValueError(f"sample is {self.sample}, expected 0 to {MAX_SAMPLES - 1}")
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"digest is {self.digest!r}, expected 16 hexadecimal digits")
        if not _FILE.fullmatch(self.file):
            raise ValueError(f"file is {self.file!r}, expected a name such as rollouts-00001.tito")
        if not uuid_bytes(self.ledger):
            raise ValueError(f"ledger is {self.ledger!r}, expected a canonical UUID")
        if min(self.end, self.turns, self.tokens, self.sampled) < 0:
            raise ValueError("end, turns, tokens and sampled must be 0 or more")


def facts_of(ledger: Ledger) -> dict[str, Any]:
    """Return the fields of an `Entry` that a finished ledger decides; those that it need not record, if it does."""
    turns, header = list(ledger), ledger.header
    reward = ledger.annotation(REWARD)
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    facts = {
        "ledger": ledger.uuid,
        "reward": float(reward) if is_number else None,  # an agent may annotate any JSON value
        "turns": len(turns),
        "tokens": sum(turn.own_length for turn in turns),
        "sampled": sum(turn.draft.columns.output for turn in turns),
    }
    own = {
        "task": header.task_id,
        "sample": header.user.get("sample"),
        "digest": header.user.get("task_digest"),
        "termination": ledger.annotation(ANNOTATION),
    }
    return facts | {name: value for name, value in own.items() if value is not None}


def expect_true(entry: Entry, ledger: Ledger, folder: Path) -> None:
    """Compare what an index says of a rollout with its ledger.

    Raises:
        SchemaError: They differ.
    """
    facts = facts_of(ledger)
    if wrong := [name for name, value in facts.items() if getattr(entry, name) != value]:
        said = ", ".join(f"{name} {getattr(entry, name)!r} (the ledger: {facts[name]!r})" for name in wrong)
        raise SchemaError(
            f"{folder / NAME} contradicts ledger {entry.ledger} in {entry.file}: it says {said}. One of them was "
            "changed: restore both from a copy."
        )


def entries(folder: str | os.PathLike[str]) -> Iterator[Entry]:
    """Yield the entries of a folder, in the order in which the rollouts ended; works during a collection too.

    Raises:
        SchemaError: The folder has no index, or a damaged one.
    """
    path = Path(folder) / NAME
    if not path.exists():
        raise SchemaError(f"{folder} has no {NAME}: it is not a folder of collected rollouts.")
    read_start(path)
    finished: dict[bytes, int] = {}
    for _, entry in read_entries(path):
        _finish(finished, entry, path)
        yield entry


@dataclass(frozen=True, slots=True)
class Start:
    """The index's first line.

    Attributes:
        run: UUID of the collection.
        about: Description of the collection, as JSON. A collection that resumes it must have the same one.
    """

    run: str
    about: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    schema: int = SCHEMA


class Index:
    """The index, open for appending. Memory holds about 200 bytes for each task and a bit for each finished rollout.

    Args:
        path: The file; created if it does not exist. An incomplete last line is removed.
        about: Description of the collection, as JSON.

    Attributes:
        run: UUID of the collection.
        ends: The offset in bytes where the last rollout of each file ends, by file name.
        count: Number of finished rollouts.

    Raises:
        SchemaError: The file is not an index, is damaged, or has another schema.
        FolderError: The index belongs to another collection.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        if not path.exists():
            _create(path, Start(str(uuid.uuid4()), dict(about)))
        self._read()
        if self.about != (requested := msgspec.json.decode(_ENCODER.encode(about))):
            differs = sorted(key for key in {*self.about, *requested} if self.about.get(key) != requested.get(key))
            theirs, ours = ({key: value.get(key) for key in differs} for value in (self.about, requested))
            raise FolderError(
                f"{path.parent} holds another collection: it has {theirs}, this one has {ours}. "
                "Use the same values to resume it, or choose another folder."
            )
        self._file = FileIO(path, "a")

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
                f"Task {task.id!r} has changed since its rollouts in {self.path.parent} were collected. Give it a new "
                "id, or choose another folder. A task without an id is identified by its line number."
            )
        return known >> _DIGEST_BITS

    def append(self, entry: Entry) -> None:
        """Append a line. The rollout is finished when its last byte is written."""
        data, written = _ENCODER.encode(entry) + b"\n", 0
        if (size := os.fstat(self._file.fileno()).st_size) != self._size:
            raise SchemaError(
                f"{self.path} has {size} bytes, and this collection wrote {self._size}: another program changed it. "
                "Nothing was written: restore it from a copy."
            )
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except BaseException:
            os.truncate(self.path, min(self._size, os.fstat(self._file.fileno()).st_size))  # never longer, with zeros
            raise
        self._size += written
        self._add(entry)

    @property
    def newest(self) -> str | None:
        """The file with the highest number, the only one that takes more rollouts; None if there is none."""
        return max(self.ends, key=file_number, default=None)

    @property
    def next_file(self) -> str:
        """The name of the file after the newest."""
        return f"rollouts-{1 + (file_number(self.newest) if self.newest else 0):05d}.tito"

    def entries_of(self, name: str) -> Iterator[Entry]:
        """Yield the entries of a file."""
        return (entry for _, entry in read_entries(self.path) if entry.file == name)

    def cut(self, file: str, end: int) -> None:
        """Remove the entries of a file that end after offset `end`: a power cut took their ledgers.

        Raises:
            SchemaError: Entries of other files follow them, which a power cut cannot cause.
        """
        at: int | None = None
        for offset, entry in read_entries(self.path):
            if entry.file == file and entry.end > end:
                at = offset if at is None else at
            elif at is not None:
                raise SchemaError(
                    f"{self.path} names ledgers after byte {end} of {file}, where that file ends, and then ledgers of "
                    "other files. Nothing was changed: restore both from a copy, or choose another folder."
                )
        if at is not None:
            os.truncate(self.path, at)
            self._read()

    def sync(self) -> None:
        """Flush the index to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the index's file."""
        self._file.close()

    def _read(self) -> None:
        start = read_start(self.path)
        self.run, self.about = start.run, start.about
        self.ends: dict[str, int] = {}
        self.count = 0
        self._finished: dict[bytes, int] = {}
        for _, entry in read_entries(self.path):
            self._add(entry)
        self._size = complete_size(self.path)
        os.truncate(self.path, self._size)

    def _add(self, entry: Entry) -> None:
        _finish(self._finished, entry, self.path)
        self.count += 1
        self.ends[entry.file] = max(entry.end, self.ends.get(entry.file, 0))


def _create(path: Path, start: Start) -> None:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(_ENCODER.encode(start) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _finish(finished: dict[bytes, int], entry: Entry, path: Path) -> None:
    """Mark an entry's sample as finished.

    Raises:
        SchemaError: The sample is already finished.
    """
    key, bit = _key(entry.task), 1 << (_DIGEST_BITS + entry.sample)
    known = finished.get(key, int(entry.digest, 16))
    if known & bit:
        raise SchemaError(
            f"{path} is damaged: it has sample {entry.sample} of task {entry.task!r} twice. Restore it from a copy, or "
            "remove one of the two lines."
        )
    finished[key] = known | bit


def _key(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=16).digest()


_START, _ENTRY = msgspec.json.Decoder(Start), msgspec.json.Decoder(Entry)


def read_start(path: Path) -> Start:
    """Read an index's first line.

    Raises:
        SchemaError: The file is not an index, or has another schema.
    """
    if path.exists() and not path.is_file():  # opening a named pipe would block
        raise SchemaError(f"{path} is not a file: choose another folder.")
    try:
        with path.open("rb") as lines:
            first = lines.readline()
    except OSError as error:
        raise SchemaError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        start = _START.decode(first)
    except UNREADABLE as error:
        raise SchemaError(f"{path} is not an index of rollouts: {error}.") from error
    if start.format != FORMAT or start.schema != SCHEMA:
        raise SchemaError(
            f"{path} has format {start.format!r}, schema {start.schema}; this version of strands-tito reads "
            f"{FORMAT!r}, schema {SCHEMA}. Upgrade strands-tito to read it."
        )
    return start


def read_entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """Yield each complete line after the first, with its offset in bytes.

    Raises:
        SchemaError: A line is damaged.
    """
    with path.open("rb") as lines:
        offset = len(lines.readline())
        for number, line in enumerate(lines, 2):
            if not line.endswith(b"\n"):
                return
            try:
                yield offset, _ENTRY.decode(line)
            except UNREADABLE as error:
                raise SchemaError(f"{path} is damaged in line {number}: {error}. Restore it from a copy.") from error
            offset += len(line)


def complete_size(path: Path) -> int:
    """Return the size in bytes up to the end of the last complete line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while size:
            start = max(0, size - 65536)
            file.seek(start)
            newline = file.read(size - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            size = start
    return 0


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a collection's file of rollouts."""
    return _FILE.fullmatch(name) is not None


def file_number(file: str) -> int:
    """Return the number in a file's name."""
    match = _FILE.fullmatch(file)
    assert match is not None, file  # `Entry` has checked it
    return int(match[1])


def recover(folder: Path, index: Index) -> None:
    """Make the index and the files agree by removing what a crash left.

    A crash leaves at most one ledger without a line. A power cut may also take the end of the index or of the newest
    file, which are flushed to disk when a file is full.

    Raises:
        SchemaError: They disagree in a way that a crash cannot cause. Nothing was changed.
    """
    unnamed = [path for path in folder.glob("*.tito") if is_file_name(path.name) and path.name not in index.ends]
    for path in unnamed:
        _expect_at_most(int(path.name == index.next_file), path, list(_ledger_ends(path)), 0)
    for name, end in index.ends.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size < end and (name != index.newest or not path.exists()):
            raise SchemaError(
                f"{path} has {size} bytes, but the index names rollouts in it up to byte {end}: restore it from a "
                "copy, or choose another folder."
            )
    if index.newest is not None:
        _recover_newest(folder / index.newest, index)
    for path in unnamed:
        path.unlink()  # no rollout in it was finished


def _recover_newest(path: Path, index: Index) -> None:
    """Truncate the newest file after the last ledger that the index names, the index after the last whole ledger."""
    ends = _ledger_ends(path)
    whole = max(ends.values(), default=0)
    end = 0
    for entry in index.entries_of(path.name):
        if entry.end <= whole:
            _expect_end(path, entry.ledger, entry.end, ends.get(uuid_bytes(entry.ledger)))
            end = max(end, entry.end)
        elif uuid_bytes(entry.ledger) in ends and _is_finished(path, entry.ledger):
            _expect_end(path, entry.ledger, entry.end, ends[uuid_bytes(entry.ledger)])
    _expect_at_most(1, path, [uuid for uuid, at in ends.items() if at > end], end)
    index.cut(path.name, whole)
    os.truncate(path, end)
    if not end:
        path.unlink()


def _ledger_ends(path: Path) -> dict[bytes, int]:
    """Return the offset in bytes where each ledger's last whole record ends, by packed UUID."""
    if path.stat().st_size < len(PREAMBLE):
        return {}
    with path.open("rb") as file:
        expect_preamble(file, path)
        return {frame.uuid: frame.offset + frame.length for frame in frames(file, len(PREAMBLE), path)}


def _is_finished(path: Path, uuid: str) -> bool:
    """Return whether a ledger is whole: its last record is the termination."""
    with LedgerFile(path) as file:
        return file.load(uuid, check=False).annotation(ANNOTATION) is not None


def _expect_end(path: Path, uuid: str, indexed: int, actual: int | None) -> None:
    if indexed != actual:
        where = "is not in the file" if actual is None else f"ends at byte {actual}"
        raise SchemaError(
            f"{path.parent / NAME} says that ledger {uuid} ends at byte {indexed} of {path.name}, but it {where}. "
            f"Nothing was changed: restore {NAME} from a copy, or choose another folder."
        )


def _expect_at_most(most: int, path: Path, ledgers: list[bytes], end: int) -> None:
    if len(ledgers) > most:
        raise SchemaError(
            f"{path} holds {len(ledgers)} rollouts after byte {end} that {NAME} does not name; a crash leaves at most "
            f"one, in the newest file. Nothing was changed: restore {NAME} from a copy, choose another folder, or "
            f"discard these rollouts with `truncate -s {end} {path}` to run them again."
        )
