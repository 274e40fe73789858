"""A file of ledgers: indexed on opening, read on demand, appended turn by turn under a lock of the file."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from weakref import WeakValueDictionary

import msgspec

from tito_core.ledger.errors import TITOError
from tito_core.ledger.laws import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Annotation, Header, Image, Turn
from tito_core.store.frames import (
    BLOCK,
    HEAD_BYTES,
    PREAMBLE,
    SCHEMA,
    Frame,
    Index,
    Kind,
    SchemaError,
    expect_preamble,
    framed,
    uuid_bytes,
)
from tito_core.store.records import UNREADABLE, expect_readable, image_record, load, record_of, turn_record

_log = logging.getLogger(__name__)
_ENCODER = msgspec.msgpack.Encoder()
LOCK_WAIT_S = 30.0
"""Longest wait for a lock that another process holds, in seconds."""
wait_s: ContextVar[float] = ContextVar("wait_s", default=LOCK_WAIT_S)
"""Longest wait for a lock in this context; with 0, `FileLockedError` is raised at once."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
"""Pauses between two tries to take the lock, in seconds; each is twice as long as the one before."""


class LedgerFile:
    """A file of ledgers, and the sink of ledgers that stream into it.

    Opening scans the file once and records the position of each record; `load` decodes a ledger. Several processes may
    append at the same time: each writes whole records under a file lock, for which it waits at most `LOCK_WAIT_S` (see
    `wait_s`). A torn tail, which a crash leaves, is skipped on reading and cut off before the next append.
    Thread-safe.

    Args:
        path: The file.
        mode: "r" to read, "a" to read and append. "a" creates the file if it does not exist.

    Raises:
        SchemaError: The file is not a rollout file, is damaged, or was written by a newer version.
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], mode: Literal["r", "a"] = "r") -> None:
        if mode not in ("r", "a"):
            raise ValueError(f"mode must be 'r' to read or 'a' to append, not {mode!r}.")
        self.path = Path(path)
        self._index = Index(path)
        self._attached: WeakValueDictionary[str, Ledger] = WeakValueDictionary()
        self._has_preamble = False
        self._scanned: tuple[int, int] | None = None  # size and mtime at the last scan
        self._lock = threading.RLock()
        self._resuming = threading.Lock()
        self._mode = mode
        self._open()
        try:
            if mode == "a":
                with self._exclusive():
                    pass
            else:
                expect_preamble(self._file, self.path)
                self._fresh_index()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        self._file = FileIO(self.path, "a+" if self._mode == "a" else "r")  # unbuffered: reads are whole blocks
        self._process = os.getpid()

    @property
    def appends(self) -> bool:
        """Whether the file was opened to append."""
        return self._mode == "a"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._fresh_index())

    def __contains__(self, uuid: str) -> bool:
        return self._fresh_index().records(uuid) is not None

    def __iter__(self) -> Iterator[Ledger]:
        for uuid in self.uuids:
            yield self.load(uuid)

    @property
    def end(self) -> int:
        """Offset after the last whole record."""
        return self._index.end

    @property
    def torn_bytes(self) -> int:
        """Bytes after the last whole record, which readers skip. A crash leaves them, or a copy that broke off."""
        with self._lock:
            end = self._fresh_index().end
            return max(0, os.fstat(self._file.fileno()).st_size - end)

    def is_ended(self, uuid: str) -> bool:
        """Return whether a ledger's rollout has an END record, after which only annotations can be written."""
        return self._fresh_index().count(uuid, Kind.END) > 0

    @property
    def uuids(self) -> list[str]:
        """UUIDs of the ledgers, in the order they began."""
        return self._fresh_index().uuids

    def load(self, uuid: str, *, check: bool = True) -> Ledger:
        """Read one ledger.

        Args:
            uuid: Its UUID.
            check: Whether to check its laws.

        Raises:
            KeyError: The file has no such ledger.
            SchemaError: Its records are damaged or contradict each other.
            LawViolationError: It breaks a law.
        """
        with self._lock:
            records = self._fresh_index().records(uuid)
            if records is None:
                raise KeyError(f"{self.path} has no ledger {uuid} among its {len(self)} ledgers.")
            headers, turns, annotations, images, _ = (tuple(records[kind]) for kind in Kind)
        if not headers:
            raise SchemaError(f"{self.path}: ledger {uuid} has no header. Restore the file from a copy.")
        header = next(self._read(headers[:1]))
        ledger = load(
            header,
            self._read(turns),
            self._read(annotations),
            msgspec.msgpack.decode,
            images=self._read(images),
            base64=False,
        )
        if ledger.uuid != uuid:
            raise SchemaError(f"{self.path}: ledger {uuid} has the header of ledger {ledger.uuid}.")
        if check:
            check_ledger(ledger)
        return ledger

    def resume(self, uuid: str) -> Ledger:
        """Return a ledger to continue: the one that already streams into this file, else the stored one, attached.

        Raises:
            KeyError, SchemaError, LawViolationError: As `load`.
        """
        with self._resuming:  # not the file's lock, which `attach` may have to wait for
            attached = self._attached.get(uuid)
            return self.attach(self.load(uuid)) if attached is None else attached

    def append(self, ledger: Ledger, end: bytes | None = None) -> None:
        """Write a ledger's turns and annotations that the file does not have yet (`Sink`), in one piece.

        Args:
            ledger: The ledger.
            end: The payload of its END record, which is written last; None ends no rollout.

        Raises:
            SchemaError: The file has more turns or annotations of this ledger, or another ledger with its UUID, or its
                rollout has ended, after which only annotations can be written.
        """
        with self._exclusive():
            self._expect_same(ledger)
            stored_turns = self._index.count(ledger.uuid, Kind.TURN)
            stored_notes = self._index.count(ledger.uuid, Kind.ANNOTATION)
            annotations = ledger.annotations[stored_notes:]  # before the turns: other threads may add both
            turns = list(ledger)[stored_turns:]
            if stored_turns > len(ledger) or stored_notes > len(ledger.annotations):
                raise SchemaError(
                    f"{self.path} has {stored_turns} turns and {stored_notes} annotations of ledger {ledger.uuid}, "
                    f"but this copy has {len(ledger)} and {len(ledger.annotations)}: load it from the file "
                    "(LedgerFile.resume) before you continue it."
                )
            known = self._stored_images(ledger.uuid) if ledger.images else set()
            records = [(Kind.IMAGE, _image(image)) for key, image in ledger.images.items() if key not in known]
            records += [(Kind.TURN, _payload(turn)) for turn in turns]
            records += [(Kind.ANNOTATION, _ENCODER.encode(record_of(annotation))) for annotation in annotations]
            records += [] if end is None else [(Kind.END, end)]
            self._write(ledger.header, records)

    def attach(self, ledger: Ledger) -> Ledger:
        """Write everything a ledger has so far, and from now on every new turn and annotation. Return the ledger.

        A ledger has one writer. A second copy of it cannot be continued, in this process or elsewhere; see `resume`.

        Raises:
            SchemaError: As `append`.
        """
        ledger.stream_to(self)
        self._attached[ledger.uuid] = ledger
        return ledger

    def turn(self, header: Header, turn: Turn, images: Sequence[Image]) -> None:
        """Write a turn that is about to be committed, after its new images (`Sink`).

        Raises:
            FileLockedError: Another process holds the lock.
            SchemaError: Another copy of the ledger was continued.
            OSError: The disk failed, or the file was closed, removed, truncated or overwritten.
        """
        records = [(Kind.IMAGE, _image(image)) for image in images]
        self._stream(header, turn.index, [*records, (Kind.TURN, _payload(turn))])

    def annotation(self, header: Header, index: int, annotation: Annotation) -> None:
        """Write a ledger's next annotation (`Sink`)."""
        self._stream(header, index, [(Kind.ANNOTATION, _ENCODER.encode(record_of(annotation)))])

    def sync(self) -> None:
        """Wait until everything written is on disk (fsync).

        Raises:
            OSError: The disk failed, or the file was closed or removed.
        """
        self.check_open()
        os.fsync(self._file.fileno())

    def check_open(self) -> None:
        """Check that the file can be written to, as far as that is known before.

        Raises:
            OSError: It was closed, removed or opened to read, or another program truncated it or wrote over it. What is
                written to such a file is lost.
        """
        if self._mode == "r":
            raise OSError(errno.EBADF, "the file was opened to read only, open it with mode 'a'", str(self.path))
        if self._file.closed:
            raise OSError(errno.EBADF, "the file was closed", str(self.path))
        if not os.fstat(self._file.fileno()).st_nlink:
            raise OSError(errno.ENOENT, "the file was removed", str(self.path))
        if lost := self._index.lost_in(self._file.fileno()):
            raise OSError(errno.EIO, lost, str(self.path))

    def close(self) -> None:
        """Close the file, without `sync`."""
        self._file.close()

    def _stream(self, header: Header, index: int, records: Sequence[tuple[Kind, bytes]]) -> None:
        """Write records, the last of which is number `index` of its kind."""
        kind = records[-1][0]
        with self._exclusive():
            written = self._index.count(header.uuid, kind)
            if written != index:
                record = f"{kind.name.lower()} record"
                raise SchemaError(
                    f"{self.path} has {written} {record}s of ledger {header.uuid}, so it cannot append {record} "
                    f"{index}: another copy of the ledger was continued, in this process or elsewhere. A ledger has "
                    "one writer. Share the ledger that streams (LedgerFile.resume), or give the other agent its own "
                    "session."
                )
            self._write(header, records)

    def _stored_images(self, uuid: str) -> set[bytes]:
        """Return the digests of a ledger's images in the file. After a crash it may have one that no turn shows."""
        records = self._index.records(uuid)
        frames = records[Kind.IMAGE] if records else []
        try:
            images = [msgspec.msgpack.decode(payload, type=_ImageData) for payload in self._read(frames)]
        except UNREADABLE as error:
            raise SchemaError(f"An image of ledger {uuid} in {self.path} cannot be read: {error}.") from error
        return {sha256(image.data).digest() for image in images}

    def _expect_same(self, ledger: Ledger) -> None:
        """Compare the header and the last common turn with the file's."""
        records = self._index.records(ledger.uuid)
        if not records:
            return
        last = min(len(ledger), len(records[Kind.TURN])) - 1
        ours = [_ENCODER.encode(record_of(ledger.header)), *([_payload(ledger[last])] if last >= 0 else [])]
        theirs = records[Kind.HEADER][:1] + (records[Kind.TURN][last : last + 1] if last >= 0 else [])
        if list(map(_canonical, ours)) != list(map(_canonical, self._read(theirs))):
            raise SchemaError(
                f"{self.path} has another ledger with UUID {ledger.uuid}, or another copy of it was continued: "
                f"{f'header or turn {last}' if last >= 0 else 'header'} differs. Load it from the file "
                "(LedgerFile.resume) before you continue it."
            )

    def _write(self, header: Header, records: Sequence[tuple[Kind, bytes]]) -> None:
        """Append records in one piece, with the ledger's header before its first one. On failure nothing changes."""
        if (known := self._index.records(header.uuid)) is None:
            records = [(Kind.HEADER, _ENCODER.encode(record_of(header))), *records]
        elif known[Kind.END] and any(kind is not Kind.ANNOTATION for kind, _ in records):
            raise SchemaError(
                f"The rollout of ledger {header.uuid} has ended in {self.path}, so its END record would no longer be "
                "true: only annotations can follow. Continue a copy of the ledger in another file."
            )
        uuid = uuid_bytes(header.uuid)
        data = b"".join(framed(kind, uuid, payload) for kind, payload in records)
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
        except BaseException as error:
            self._cut_tail()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise
        for kind, payload in records:
            self._index.add(Frame(kind, uuid, self._index.end + HEAD_BYTES, len(payload)))

    def _cut_tail(self) -> int:
        """Cut off what follows the last whole record, and return the number of bytes. Never extends the file."""
        torn = os.fstat(self._file.fileno()).st_size - self._index.end
        if torn > 0:
            self._file.truncate(self._index.end)
        return torn

    def _fresh_index(self) -> Index:
        """Return the index, updated with the whole records that other writers added since."""
        with self._lock:
            stat = os.fstat(self._file.fileno())
            state = stat.st_size, stat.st_mtime_ns
            if state != self._scanned:  # otherwise a long torn tail would be read again for every ledger
                if lost := self._index.lost_in(self._file.fileno()):
                    raise SchemaError(f"{self.path} changed while it was open: {lost}. Open it again.")
                self._index.scan(self._file)
                self._scanned = state
            return self._index

    def _read(self, frames: Sequence[Frame]) -> Iterator[memoryview]:
        """Yield payloads; neighbouring ones are read in one block."""
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
        """Hold the file's exclusive lock, with the index up to date and any torn tail cut off.

        Other threads can use the file during the wait. (`flock` itself would wait without end.)
        """
        wait = LockWait(self.path, wait_s.get())
        while not self._try_lock():
            time.sleep(wait.pause_s())
        try:
            self._catch_up()
            yield
        finally:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
            self._lock.release()

    def _try_lock(self) -> bool:
        """Take the lock of this object and of the file, or neither if another process holds the file's."""
        if self._process != os.getpid():  # after a fork: a shared open file would share its lock with the parent
            self._file.close()
            self._lock, self._resuming = threading.RLock(), threading.Lock()
            self._open()
        self._lock.acquire()
        try:
            self.check_open()
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.release()
            return False
        except BaseException:
            self._lock.release()
            raise
        return True

    def _catch_up(self) -> None:
        self.check_open()  # again: the file may have changed before it was locked
        size = os.fstat(self._file.fileno()).st_size
        if size < len(PREAMBLE):
            self._file.seek(0)
            if PREAMBLE.startswith(self._file.read(size)):
                self._file.truncate(0)
                self._file.write(PREAMBLE)
                size = len(PREAMBLE)
        if not self._has_preamble:
            self._file.seek(0)
            if expect_preamble(self._file, self.path) < SCHEMA:
                self._upgrade()
            self._has_preamble = True
        if size != self._index.end:
            self._index.scan(self._file)
            if torn := self._cut_tail():
                _log.warning(
                    "path=<%s>, bytes=<%d>, at=<%d> | cut off a torn tail, which a crash left",
                    self.path, torn, self._index.end,
                )  # fmt: skip

    def _upgrade(self) -> None:
        """Write this version's schema into the preamble: one byte, which no crash can tear."""
        fileno = self._file.fileno()
        flags = fcntl.fcntl(fileno, fcntl.F_GETFL)
        fcntl.fcntl(fileno, fcntl.F_SETFL, flags & ~os.O_APPEND)  # with it, Linux appends wherever one writes
        try:
            os.pwrite(fileno, PREAMBLE, 0)
        finally:
            fcntl.fcntl(fileno, fcntl.F_SETFL, flags)


class FileLockedError(TITOError, BlockingIOError):
    """Another process holds the lock of the file. Nothing was written."""


class LockWait:
    """A bounded wait for a lock: how long to pause before the next try. A first pause of a second is logged.

    Args:
        path: The locked file.
        within_s: Longest wait in seconds.
    """

    def __init__(self, path: str | os.PathLike[str], within_s: float = LOCK_WAIT_S) -> None:
        self._path = path
        self._began = time.monotonic()
        self._within_s = within_s
        self._next_s = _SHORTEST_PAUSE_S
        self._logged = False

    def pause_s(self) -> float:
        """Return the seconds until the next try.

        Raises:
            FileLockedError: The time is up.
        """
        waited_s = time.monotonic() - self._began
        if waited_s >= self._within_s:
            raise FileLockedError(
                errno.EAGAIN,
                f"another process has held the file's lock for {waited_s:.1f} s; `fuser` or `lslocks` shows which",
                str(self._path),
            )
        if waited_s >= 1 and not self._logged:
            self._logged = True
            _log.warning("path=<%s> | another process holds the lock of the file, waiting", self._path)
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_PAUSE_S)
        return min(pause_s, self._within_s - waited_s)


class _ImageData(msgspec.Struct):
    data: bytes


def _canonical(payload: bytes | memoryview) -> bytes:
    """Encode a record again with sorted keys: a ledger loaded from JSON has another order.

    Raises:
        SchemaError: The record is not MessagePack, or is nested too deeply.
    """
    try:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(payload), order="deterministic")
    except (*UNREADABLE, TypeError) as error:
        raise SchemaError(f"A record of the file cannot be read: {error}. Restore the file from a copy.") from error


def _image(image: Image) -> bytes:
    return _ENCODER.encode(image_record(image))


def _payload(turn: Turn) -> bytes:
    try:
        payload = _ENCODER.encode(turn_record(turn))
    except (OverflowError, RecursionError) as error:
        raise SchemaError(f"Turn {turn.index} cannot be written: {error}.") from error
    expect_readable(turn, payload)
    return payload
