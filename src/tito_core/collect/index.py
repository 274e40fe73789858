"""The index of a folder of rollouts: a line each, which is what makes a rollout finished."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from tito_core.collect.errors import FolderError, TaskError
from tito_core.collect.task import Task
from tito_core.store import SchemaError
from tito_core.store.index import packed
from tito_core.store.records import UNREADABLE

NAME = "index.jsonl"
FORMAT = "strands-tito/collect"
SCHEMA = 1
MAX_SAMPLES = 1 << 16
"""Most rollouts of one task: the index holds a bit for each up to the highest, so a line costs at most 8 KiB."""
_DIGEST_BITS = 64
_DIGEST = re.compile("[0-9a-f]{16}")
_FILE = re.compile(r"rollouts-(\d{5,9})\.tito")
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Start:
    """The index's first line.

    Attributes:
        run: Identity of the collection, a UUID.
        about: What it is a collection of, as JSON; one that goes on with it must say the same.
    """

    run: str
    about: dict[str, Any] = field(default_factory=dict)
    format: str = FORMAT
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished rollout: a line of the index.

    Attributes:
        task: Its task's id.
        sample: Which one of the task's group, from 0.
        digest: The task's digest.
        ledger: UUID of its ledger.
        file: The file that holds it, in the index's folder.
        end: Where its last record ends in that file, in bytes.
        termination: Why it ended.
        reward: Its reward, or None where nobody said.
        turns: Turns of its ledger.
        tokens: Tokens of its ledger, each counted once.
        sampled: Those that the policy sampled.
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
        """Check what a line of a file may claim; nothing outside the folder is named, and nothing large is made.

        Raises:
            ValueError: A value is out of range.
        """
        if not 0 <= self.sample < MAX_SAMPLES:
            raise ValueError(f"sample is {self.sample}, expected 0 to {MAX_SAMPLES - 1}")
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"digest is {self.digest!r}, expected 16 hexadecimal digits")
        if not _FILE.fullmatch(self.file):
            raise ValueError(f"file is {self.file!r}, expected a name such as rollouts-00001.tito")
        if not packed(self.ledger):
            raise ValueError(f"ledger is {self.ledger!r}, expected a canonical UUID")
        if min(self.end, self.turns, self.tokens, self.sampled) < 0:
            raise ValueError("end, turns, tokens and sampled must be 0 or more")


_START, _ENTRY = msgspec.json.Decoder(Start), msgspec.json.Decoder(Entry)


class Index:
    """The index, open to go on with. Memory holds some 200 bytes of each task, and a bit of each finished rollout.

    Args:
        path: Its file, made if need be. A line that a crash has cut short is cut away.
        about: What is collected.

    Attributes:
        run: Identity of the collection.
        ends: Each file of rollouts with where the last of its rollouts ends, in bytes.
        count: Number of finished rollouts.

    Raises:
        SchemaError: It is no index, a newer one, or damaged.
        FolderError: It is an index of something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        if not path.exists():
            _create(path, Start(str(uuid.uuid4()), dict(about)))
        self._read()
        if self.about != (said := msgspec.json.decode(_ENCODER.encode(about))):
            differs = sorted(key for key in {*self.about, *said} if self.about.get(key) != said.get(key))
            was, now = ({key: value.get(key) for key in differs} for value in (self.about, said))
            raise FolderError(
                f"{path.parent} holds rollouts of another collection, with {was} where this has {now}. "
                "Go on with the same, or choose another folder."
            )
        self._file = FileIO(path, "a")

    def done(self, task: Task) -> int:
        """Give a task's finished samples as bits: bit 3 is sample 3.

        Raises:
            TaskError: The task has another content than the one whose rollouts are there.
        """
        known = self._done.get(_key(task.id))
        if known is None:
            return 0
        if known & ((1 << _DIGEST_BITS) - 1) != int(task.digest, 16):
            raise TaskError(
                f"Task {task.id!r} is another one than that whose rollouts are in {self.path.parent}. Give it an id of "
                "its own, or choose another folder; tasks without an id are known by their line."
            )
        return known >> _DIGEST_BITS

    def append(self, entry: Entry) -> None:
        """Add a line: with its last byte the rollout is finished."""
        data, written = _ENCODER.encode(entry) + b"\n", 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except BaseException:
            self._file.truncate(self._size)
            raise
        self._size += written
        self._add(entry)

    @property
    def newest(self) -> str | None:
        """The file with the highest number, or None: only that one takes more rollouts."""
        return max(self.ends, key=_number, default=None)

    @property
    def next_file(self) -> str:
        """The name of the file after the newest."""
        return f"rollouts-{1 + (_number(self.newest) if self.newest else 0):05d}.tito"

    def of_file(self, name: str) -> Iterator[Entry]:
        """Yield the rollouts of a file."""
        return (entry for _, entry in _entries(self.path) if entry.file == name)

    def cut(self, file: str, end: int) -> None:
        """Forget the rollouts of a file that end past `end` bytes: a power cut took them.

        Raises:
            SchemaError: Other rollouts follow them, which no power cut explains.
        """
        at: int | None = None
        for offset, entry in _entries(self.path):
            if entry.file == file and entry.end > end:
                at = offset if at is None else at
            elif at is not None:
                raise SchemaError(
                    f"{self.path} names ledgers past byte {end} of {file}, where that file ends, and then others. "
                    "Nothing was changed: restore both from a copy, or choose another folder."
                )
        if at is not None:
            os.truncate(self.path, at)
            self._read()

    def sync(self) -> None:
        """Wait until it is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close its file."""
        self._file.close()

    def _read(self) -> None:
        start = read_start(self.path)
        self.run, self.about = start.run, start.about
        self.ends: dict[str, int] = {}
        self.count = 0
        self._done: dict[bytes, int] = {}
        for _, entry in _entries(self.path):
            self._add(entry)
        self._size = _whole(self.path)
        os.truncate(self.path, self._size)

    def _add(self, entry: Entry) -> None:
        _finish(self._done, entry, self.path)
        self.count += 1
        self.ends[entry.file] = max(entry.end, self.ends.get(entry.file, 0))


def read_start(path: Path) -> Start:
    """Read an index's first line.

    Raises:
        SchemaError: It is no index, or a newer one.
    """
    try:
        with path.open("rb") as lines:
            first = lines.readline()
    except OSError as error:
        raise SchemaError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        start = _START.decode(first)
    except UNREADABLE as error:
        raise SchemaError(f"{path} is no index of rollouts: {error}.") from error
    if start.format != FORMAT or start.schema != SCHEMA:
        raise SchemaError(
            f"{path} has format {start.format!r}, schema {start.schema}, this version of strands-tito reads "
            f"{FORMAT!r}, schema {SCHEMA}: upgrade strands-tito to read it."
        )
    return start


def entries(folder: str | os.PathLike[str]) -> Iterator[Entry]:
    """Yield the finished rollouts of a folder, in the order they ended; also while a collection goes on there.

    Raises:
        SchemaError: The folder has no index, or a damaged one.
    """
    path = Path(folder) / NAME
    if not path.exists():
        raise SchemaError(f"{folder} has no {NAME}: it is no folder of collected rollouts.")
    read_start(path)
    done: dict[bytes, int] = {}
    for _, entry in _entries(path):
        _finish(done, entry, path)
        yield entry


def _entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """Yield each whole line after the first, and where it begins."""
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


def _finish(done: dict[bytes, int], entry: Entry, path: Path) -> None:
    """Add a rollout to those that are finished, by their task.

    Raises:
        SchemaError: It is there already.
    """
    key, bit = _key(entry.task), 1 << (_DIGEST_BITS + entry.sample)
    known = done.get(key, int(entry.digest, 16))
    if known & bit:
        raise SchemaError(
            f"{path} is damaged: it has sample {entry.sample} of task {entry.task!r} twice. Restore it from a copy, or "
            "remove one of the two lines."
        )
    done[key] = known | bit


def _whole(path: Path) -> int:
    """Give the bytes up to the end of the last whole line."""
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


def _create(path: Path, start: Start) -> None:
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(_ENCODER.encode(start) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def is_file_name(name: str) -> bool:
    """Return whether a collection may have given a file its name."""
    return _FILE.fullmatch(name) is not None


def _number(file: str) -> int:
    found = _FILE.fullmatch(file)
    assert found is not None, file  # entries have no other names
    return int(found[1])


def _key(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=16).digest()
