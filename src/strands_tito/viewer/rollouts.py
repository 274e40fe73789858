"""The rollouts of several files and folders, which may grow, and the rows of a table of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from strands_tito.collect.folder import Entry, entries, files_of
from strands_tito.viewer.data import TokenTexts
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import count
from tito_core.parsing.completion import CallStatus
from tito_core.store import LedgerFile, SchemaError

_DAMAGED = (CallStatus.MALFORMED, CallStatus.TRUNCATED)
"""Statuses that the table counts as malformed. Lenient calls ran, and suspect texts are no calls."""
INDEXED = ("number", "ledger", "source", "task", "group", "reward", "turns", "tokens", "sampled", "termination")
"""Columns that need no ledger: a folder's END records fill all but the group, a file only number, ledger and source."""
READ = (*INDEXED[3:], "malformed", "logprob", "drift", "backend", "agents")
"""Columns that are filled from the ledger."""


class Place(NamedTuple):
    """The location of a rollout.

    Attributes:
        file: The file that holds its ledger.
        ledger: The ledger's UUID.
        entry: Its facts, if it belongs to a collection.
    """

    file: Path
    ledger: str
    entry: Entry | None = None


class Skipped(NamedTuple):
    """Bytes or ledgers that are not among the rollouts.

    Attributes:
        text: What was skipped, in one or two sentences.
        may_be_lost: Whether it may be a part of a rollout that was finished. At the end of a folder it is not: a crash
            leaves the beginning of one there, which runs again.
    """

    text: str
    may_be_lost: bool


class Rollouts:
    """Rollouts of several files and folders. They may grow: new rollouts get the next numbers.

    Args:
        paths: Files of ledgers, and folders of collected rollouts.

    Raises:
        SchemaError: A path is neither, or is damaged, or has a newer schema than this version reads.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._paths = [Path(path) for path in paths]
        self._places: list[Place] = []
        self._numbers: dict[tuple[Path, str], int] = {}  # counted from 0
        self._sizes: dict[Path, int] = {}
        self._files: dict[Path, LedgerFile] = {}
        self._lock = threading.RLock()
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def title(self) -> str:
        """Names of the files and folders."""
        return ", ".join(path.name or str(path) for path in self._paths)

    def refresh(self) -> None:
        """Add the rollouts written since the last call, and the rewards annotated since."""
        with self._lock:
            for path in self._paths:
                for place in self._places_in(path):
                    number = self._numbers.setdefault((place.file, place.ledger), len(self._places))
                    self._places[number : number + 1] = [place]

    def place(self, number: int) -> Place:
        """Return the location of a rollout.

        Raises:
            IndexError: Unknown number.
        """
        if not 1 <= number <= len(self._places):
            raise IndexError(f"Unknown rollout {number}: {self.title} holds {len(self._places)} rollouts.")
        return self._places[number - 1]

    def load(self, number: int, *, check: bool = False) -> Ledger:
        """Read one ledger. The viewer does not check its laws: its page reports a broken law.

        Raises:
            IndexError: Unknown number.
            SchemaError: The file is damaged or lacks the ledger.
            LawViolationError: With `check`, the ledger breaks a law.
        """
        place = self.place(number)
        try:
            ledger = self._file(place.file).load(place.ledger, check=check)
        except KeyError as error:
            raise SchemaError(
                f"{place.file} does not hold ledger {place.ledger}: restore the file from a copy."
            ) from error
        return ledger

    def skipped(self) -> list[Skipped]:
        """Return what the files and folders hold besides these rollouts: unfinished records and rollouts."""
        found: list[Skipped] = []
        newest = [files[-1] for path in self._paths if path.is_dir() and (files := files_of(path))]
        for path in dict.fromkeys([place.file for place in self._places] + [p for p in self._paths if p.is_file()]):
            file, in_folder = self._file(path), path not in self._paths
            if torn := file.torn_bytes:
                text = (
                    f"{path} ends inside a record: its last {torn:,} bytes, from byte {file.end:,} on, were skipped. A "
                    "writer was killed there or is writing now, or a copy broke off: compare it with the original."
                )
                found.append(Skipped(text, path not in newest))
            unfinished = [uuid for uuid in file.uuids if (path, uuid) not in self._numbers] if in_folder else []
            if unfinished:
                ledgers = f"{count(len(unfinished), 'ledger')} (the first is {unfinished[0]})"
                text = f"{path} holds {ledgers} without an END record: unfinished, so not among these rollouts."
                found.append(Skipped(text, False))
        return found

    def name(self, number: int) -> str:
        """Return a short title for a rollout."""
        place = self.place(number)
        task = f", {place.entry.task}, sample {place.entry.sample}" if place.entry else ""
        return f"Rollout {number}{task}, {place.file.name}"

    def index_rows(self) -> list[list[Any]]:
        """Return one row of `INDEXED` per rollout, without reading ledgers."""
        return [_index_row(number, place) for number, place in enumerate(self._places, 1)]

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _places_in(self, path: Path) -> Iterator[Place]:
        if path.is_dir():
            yield from (Place(path / entry.file, entry.ledger, entry) for entry in entries(path, self._sizes))
        else:
            yield from (Place(path, uuid) for uuid in self._file(path).uuids)

    def _file(self, path: Path) -> LedgerFile:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = LedgerFile(path)
                except OSError as error:
                    raise SchemaError(f"{path} cannot be read: {error.strerror}.") from error
            return self._files[path]


def _index_row(number: int, place: Place) -> list[Any]:
    entry = place.entry
    facts: list[Any] = [None] * 7
    if entry is not None:
        facts = [entry.task, None, entry.reward, entry.turns, entry.tokens, entry.sampled, entry.termination]
    return [number, place.ledger, place.file.name, *facts]


def read_rows(rollouts: Rollouts, start: int, texts: TokenTexts, is_enough: Callable[[], bool]) -> list[list[Any]]:
    """Return rows of `READ` from rollout `start` (counted from 0) until `is_enough` returns True; at least one row.

    The row of a ledger that cannot be read holds only None; the rollout's own page reports why.
    """
    rows: list[list[Any]] = []
    for number in range(start + 1, len(rollouts) + 1):
        try:
            rows.append(_read_row(rollouts.load(number), texts))
        except SchemaError:
            rows.append([None] * len(READ))
        if is_enough():
            break
    return rows


def _read_row(ledger: Ledger, texts: TokenTexts) -> list[Any]:
    turns = [turn.draft for turn in ledger]
    sampled = sum(draft.columns.output for draft in turns)
    total = float(sum(np.sum(draft.logprobs, dtype=np.float64) for draft in turns))
    text = texts.named(ledger.header.tokenizer)
    drifted = None if text is None else sum(bool(text.drift(draft.output_ids.tolist())) for draft in turns)
    reward = ledger.annotation("reward")
    return [
        ledger.header.task_id,
        ledger.header.group_id,
        reward if isinstance(reward, int | float | None) and not isinstance(reward, bool) else str(reward),
        len(turns),
        sum(draft.columns.prompt for draft in turns) + sampled,
        sampled,
        _optional_text(ledger.annotation("termination")),
        sum(call.status in _DAMAGED for draft in turns for call in draft.calls),
        total / sampled if sampled else None,
        drifted / len(turns) if drifted is not None and turns else None,
        ", ".join(sorted({draft.engine.server.backend for draft in turns})),
        ", ".join(ledger.agents) or None,
    ]


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(value)
