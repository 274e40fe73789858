"""The index of a folder of rollouts: a line each, which is what makes a rollout finished."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from strands_tito.collect.entry import NAME, Entry, Start, file_number, read_entries, read_start
from strands_tito.collect.errors import FolderError, TaskError
from strands_tito.collect.task import Task
from tito_core.store import SchemaError

_DIGEST_BITS = 64
_ENCODER = msgspec.json.Encoder()


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
        """Return a task's finished samples as bits: bit 3 is sample 3.

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
        return max(self.ends, key=file_number, default=None)

    @property
    def next_file(self) -> str:
        """The name of the file after the newest."""
        return f"rollouts-{1 + (file_number(self.newest) if self.newest else 0):05d}.tito"

    def of_file(self, name: str) -> Iterator[Entry]:
        """Yield the rollouts of a file."""
        return (entry for _, entry in read_entries(self.path) if entry.file == name)

    def cut(self, file: str, end: int) -> None:
        """Forget the rollouts of a file that end past `end` bytes: a power cut took them.

        Raises:
            SchemaError: Other rollouts follow them, which no power cut explains.
        """
        at: int | None = None
        for offset, entry in read_entries(self.path):
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
        for _, entry in read_entries(self.path):
            self._add(entry)
        self._size = _whole(self.path)
        os.truncate(self.path, self._size)

    def _add(self, entry: Entry) -> None:
        _finish(self._done, entry, self.path)
        self.count += 1
        self.ends[entry.file] = max(entry.end, self.ends.get(entry.file, 0))


def entries(folder: str | os.PathLike[str]) -> Iterator[Entry]:
    """Yield the finished rollouts of a folder, in the order they ended; also while a collection goes on there.

    Raises:
        SchemaError: The folder has no index, or a damaged one.
    """
    path = Path(folder) / NAME
    if not path.exists():
        raise SchemaError(f"{folder} has no {NAME}: it is not a folder of collected rollouts.")
    read_start(path)
    done: dict[bytes, int] = {}
    for _, entry in read_entries(path):
        _finish(done, entry, path)
        yield entry


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
    """Return the bytes up to the end of the last whole line."""
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


def _key(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=16).digest()
