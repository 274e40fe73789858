"""The index of a folder of rollouts. A rollout is finished when its line is complete."""

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


def _create(path: Path, start: Start) -> None:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(_ENCODER.encode(start) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _key(task: str) -> bytes:
    return hashlib.blake2b(task.encode(), digest_size=16).digest()
