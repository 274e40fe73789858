"""A file of ledgers: an index of where each record lies, ledgers read when they are asked for, turns appended."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from weakref import WeakValueDictionary

import msgspec

from tito_core.ledger.forest_invariants import check_ledger
from tito_core.ledger.header import Annotation, Header
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Turn
from tito_core.store.frames import BLOCK, PREAMBLE, Frame, Kind, SchemaError, expect_preamble, framed
from tito_core.store.index import Index, packed
from tito_core.store.records import UNREADABLE, expect_readable, load, record_of, turn_record

_ENCODER = msgspec.msgpack.Encoder()


class LedgerFile:
    """A file of ledgers, and the sink of those that stream into it.

    Opening scans the file once and keeps where each record lies; a ledger is decoded when it is asked for. Several
    processes may append at once: each record is written whole under a lock of the file. A torn tail that a crash left
    is cut before anything is appended, and skipped by who only reads.

    Args:
        path: The file.
        mode: "r" to read, "a" to append too, which makes the file if need be.

    Raises:
        SchemaError: Not such a file, damaged in the middle, or written by a newer version.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Literal["r", "a"] = "r") -> None:
        if mode not in ("r", "a"):
            raise ValueError(f"mode must be 'r' to read or 'a' to append, not {mode!r}.")
        self.path = Path(path)
        self._index = Index(path)
        self._live: WeakValueDictionary[str, Ledger] = WeakValueDictionary()
        self._is_ours = False
        self._scanned: tuple[int, int] | None = None  # size and time of the last change when the file was scanned
        self._lock = threading.RLock()
        self._mode = mode
        self._open()
        try:
            if mode == "a":
                with self._exclusive():
                    pass
            else:
                expect_preamble(self._file, self.path)
                self._index.scan(self._file)
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        self._file = FileIO(self.path, "a+" if self._mode == "a" else "r")  # what is read of it is read in blocks
        self._process = os.getpid()

    @property
    def appends(self) -> bool:
        """Whether the file takes turns, or was opened to read."""
        return self._mode == "a"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, uuid: str) -> bool:
        return self._known().records(uuid) is not None

    def __iter__(self) -> Iterator[Ledger]:
        for uuid in self.uuids:
            yield self.load(uuid)

    @property
    def uuids(self) -> list[str]:
        """Identities of the ledgers, in the order they began."""
        return self._known().uuids

    def load(self, uuid: str, *, check: bool = True) -> Ledger:
        """Read one ledger.

        Args:
            uuid: Its identity.
            check: Whether to check its laws.

        Raises:
            KeyError: The file has no such ledger.
            SchemaError: Its records do not fit together.
            LawViolationError: It breaks a law.
        """
        with self._lock:
            found = self._known().records(uuid)
            if found is None:
                raise KeyError(f"{self.path} has no ledger {uuid}; it has {len(self)} others.")
            headers, turns, annotations = (tuple(found[kind]) for kind in Kind)
        if not headers:
            raise SchemaError(f"{self.path}: ledger {uuid} does not begin with its header.")
        header = next(self._read(headers[:1]))
        ledger = load(header, self._read(turns), self._read(annotations), msgspec.msgpack.decode, base64=False)
        if ledger.uuid != uuid:
            raise SchemaError(f"{self.path}: the header of ledger {uuid} says that it is {ledger.uuid}.")
        if check:
            check_ledger(ledger)
        return ledger

    def resume(self, uuid: str) -> Ledger:
        """Return a ledger to go on with: the one that already streams here, else as the file has it.

        Raises:
            KeyError, SchemaError, LawViolationError: As `load`.
        """
        with self._lock:
            live = self._live.get(uuid)
            return self.attach(self.load(uuid)) if live is None else live

    def append(self, ledger: Ledger) -> None:
        """Write what the file does not have of a ledger yet (`Sink`).

        Raises:
            SchemaError: The file has more of this ledger than it holds itself, or has something else under its name.
        """
        with self._exclusive():
            self._expect_same(ledger)
            turns_written, said = (
                self._index.count(ledger.uuid, Kind.TURN),
                self._index.count(ledger.uuid, Kind.ANNOTATION),
            )
            turns, annotations = list(ledger)[turns_written:], ledger.annotations[said:]
            if turns_written > len(ledger) or said > len(ledger.annotations):
                raise SchemaError(
                    f"{self.path} has {turns_written} turns of ledger {ledger.uuid}, which itself holds "
                    f"{len(ledger)}: load it from the file before going on with it."
                )
            parts = [framed(Kind.TURN, packed(ledger.uuid), _payload(turn)) for turn in turns]
            parts += [
                framed(Kind.ANNOTATION, packed(ledger.uuid), _ENCODER.encode(record_of(annotation)))
                for annotation in annotations
            ]
            self._write(ledger.header, b"".join(parts))

    def attach(self, ledger: Ledger) -> Ledger:
        """Write what a ledger holds so far, and from now on every turn and annotation as it comes.

        A ledger has one writer: another copy of it, in this process or elsewhere, cannot go on beside it (`resume`).
        """
        ledger.stream_to(self)
        self._live[ledger.uuid] = ledger
        return ledger

    def turn(self, header: Header, turn: Turn) -> None:
        """Take a turn that is about to be committed (`Sink`)."""
        self._stream(header, Kind.TURN, turn.index, _payload(turn))

    def annotation(self, header: Header, index: int, annotation: Annotation) -> None:
        """Take a ledger's next annotation (`Sink`)."""
        self._stream(header, Kind.ANNOTATION, index, _ENCODER.encode(record_of(annotation)))

    def sync(self) -> None:
        """Wait until everything that was written is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. What was written stays, and is on the disk after `sync`."""
        self._file.close()

    def _stream(self, header: Header, kind: Kind, index: int, payload: bytes) -> None:
        with self._exclusive():
            written = self._index.count(header.uuid, kind)
            if written != index:
                raise SchemaError(
                    f"{self.path} has {written} {kind.name.lower()} records of ledger {header.uuid}, and number "
                    f"{index} came: another copy of it went on, in this process or elsewhere. A ledger has one writer; "
                    "share the one that streams (LedgerFile.resume), or give the other agent a session of its own."
                )
            self._write(header, framed(kind, packed(header.uuid), payload))

    def _expect_same(self, ledger: Ledger) -> None:
        """Compare the header and the last common turn with what the file has under the same name."""
        found = self._index.records(ledger.uuid)
        if not found:
            return
        last = min(len(ledger), len(found[Kind.TURN])) - 1
        ours = [_ENCODER.encode(record_of(ledger.header)), *([_payload(ledger[last])] if last >= 0 else [])]
        theirs = found[Kind.HEADER][:1] + (found[Kind.TURN][last : last + 1] if last >= 0 else [])
        if list(map(_canonical, ours)) != list(map(_canonical, self._read(theirs))):
            raise SchemaError(
                f"{self.path} has another ledger under the name {ledger.uuid}, or another copy of it went on: its "
                f"{'turn ' + str(last) if last >= 0 else 'header'} differs. Load it from the file before going on."
            )

    def _write(self, header: Header, data: bytes) -> None:
        """Append whole records, after the ledger's header where it has none yet; on failure nothing stays."""
        if self._index.records(header.uuid) is None:
            data = framed(Kind.HEADER, packed(header.uuid), _ENCODER.encode(record_of(header))) + data
        added = self._index.parsed(data)
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            self._file.truncate(self._index.end)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        except BaseException:
            self._file.truncate(self._index.end)
            raise
        self._index.add(added)

    def _known(self) -> Index:
        """Return the index, with what other writers added since; what they are still writing is not whole yet."""
        with self._lock:
            found = os.fstat(self._file.fileno())
            state = found.st_size, found.st_mtime_ns
            if state != self._scanned:  # a torn tail may be long, and is not read again for every ledger
                self._index.scan(self._file)
                self._scanned = state
            return self._index

    def _read(self, frames: Sequence[Frame]) -> Iterator[memoryview]:
        """Read payloads, several at once where they lie together, as those of a finished ledger do."""
        first = 0
        while first < len(frames):
            start = stop = frames[first].offset
            last = first
            for _, _, offset, length in frames[first:]:
                if last > first and (offset + length - start > BLOCK or offset - stop > length):
                    break
                stop, last = offset + length, last + 1
            block = memoryview(os.pread(self._file.fileno(), stop - start, start))
            for _, _, offset, length in frames[first:last]:
                yield block[offset - start : offset - start + length]
            first = last

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the file alone, with its index up to date and its torn tail cut."""
        if self._process != os.getpid():  # a fork shares its parent's open file, and with it the lock
            self._file.close()
            self._lock = threading.RLock()
            self._open()
        with self._lock:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX)
            try:
                self._catch_up()
                yield
            finally:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size < len(PREAMBLE):
            self._file.seek(0)
            if PREAMBLE.startswith(self._file.read(size)):
                self._file.truncate(0)
                self._file.write(PREAMBLE)
                size = len(PREAMBLE)
        if not self._is_ours:
            self._file.seek(0)
            expect_preamble(self._file, self.path)
            self._is_ours = True
        if size != self._index.end:
            self._index.scan(self._file)
            self._file.truncate(self._index.end)


def _canonical(payload: bytes | memoryview) -> bytes:
    """Return a record with its keys in one order: a copy that came by JSON has them in another.

    Raises:
        SchemaError: It is not MessagePack, or is nested too deeply.
    """
    try:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(payload), order="deterministic")
    except (*UNREADABLE, TypeError) as error:
        raise SchemaError(f"A record of the file cannot be read: {error}. Restore the file from a copy.") from error


def _payload(turn: Turn) -> bytes:
    try:
        payload = _ENCODER.encode(turn_record(turn))
    except (OverflowError, RecursionError) as error:
        raise SchemaError(f"Turn {turn.index} cannot be written: {error}.") from error
    expect_readable(turn, payload)
    return payload
