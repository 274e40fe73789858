"""The rollouts of files and folders, numbered from 1; each ledger is read when it is asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from strands_tito.collect.entry import Entry
from strands_tito.collect.index import entries
from strands_tito.viewer.token_text import TokenTexts
from tito_core.ledger.ledger import Ledger
from tito_core.store import LedgerFile, SchemaError

INDEXED = ("number", "ledger", "source", "task", "group", "reward", "turns", "tokens", "sampled", "termination")
"""Columns of the table that show at once: an index has all but the group, a file only the ledger's name."""
READ = (*INDEXED[3:], "malformed", "logprob", "drift", "backend")
"""Columns that a ledger itself fills."""


class Place(NamedTuple):
    """Where a rollout lies.

    Attributes:
        file: The file that holds its ledger.
        ledger: The ledger's UUID.
        entry: Its line of a collection's index, where it is in one.
    """

    file: Path
    ledger: str
    entry: Entry | None = None


class Rollouts:
    """Rollouts of several files and folders. They may grow meanwhile: what is new gets the next numbers.

    Args:
        paths: Files of ledgers, and folders of collected rollouts.

    Raises:
        SchemaError: One is neither, damaged, or newer than this version.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._paths = [Path(path) for path in paths]
        self._places: list[Place] = []
        self._known: set[tuple[Path, str]] = set()
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
        """The names of the files and folders."""
        return ", ".join(path.name or str(path) for path in self._paths)

    def refresh(self) -> None:
        """Take up the rollouts that were written since."""
        with self._lock:
            for path in self._paths:
                for place in self._found(path):
                    if (place.file, place.ledger) not in self._known:
                        self._known.add((place.file, place.ledger))
                        self._places.append(place)

    def place(self, number: int) -> Place:
        """Return where a rollout lies.

        Raises:
            IndexError: There is no such number.
        """
        if not 1 <= number <= len(self._places):
            raise IndexError(f"Unknown rollout {number}: {self.title} holds {len(self._places)}.")
        return self._places[number - 1]

    def load(self, number: int) -> Ledger:
        """Read one ledger, its laws unchecked: a page shows what is broken.

        Raises:
            IndexError: There is no such number.
            SchemaError: Its records do not fit together, or its file lacks it.
        """
        place = self.place(number)
        try:
            return self._file(place.file).load(place.ledger, check=False)
        except KeyError as error:
            raise SchemaError(f"{place.file} has no ledger {place.ledger}: restore it from a copy.") from error

    def name(self, number: int) -> str:
        """Return a short name for a rollout."""
        place = self.place(number)
        task = f", {place.entry.task}, sample {place.entry.sample}" if place.entry else ""
        return f"Rollout {number}{task}, {place.file.name}"

    def index_rows(self) -> list[list[Any]]:
        """Return a row of `INDEXED` a rollout, without reading ledgers."""
        return [_index_row(number, place) for number, place in enumerate(self._places, 1)]

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _found(self, path: Path) -> Iterator[Place]:
        if path.is_dir():
            yield from (Place(path / entry.file, entry.ledger, entry) for entry in entries(path))
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
    known = [None] * 7 if entry is None else _of_entry(entry)
    return [number, place.ledger, place.file.name, *known]


def _of_entry(entry: Entry) -> list[Any]:
    return [entry.task, None, entry.reward, entry.turns, entry.tokens, entry.sampled, entry.termination]


def read_rows(rollouts: Rollouts, start: int, texts: TokenTexts, is_enough: Callable[[], bool]) -> list[list[Any]]:
    """Return rows of `READ` from rollout `start` on, counted from 0, until it is enough; at least one.

    A ledger that cannot be read has only None in its row: its own page says why.
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
    text = texts.of(ledger.header.tokenizer)
    drifted = None if text is None else sum(bool(text.drift(draft.output_ids.tolist())) for draft in turns)
    reward = ledger.annotation("reward")
    return [
        ledger.header.task_id,
        ledger.header.group_id,
        reward if isinstance(reward, int | float | None) and not isinstance(reward, bool) else str(reward),
        len(turns),
        sum(draft.columns.prompt for draft in turns) + sampled,
        sampled,
        _word(ledger.annotation("termination")),
        sum(call.status != "ok" for draft in turns for call in draft.calls),
        total / sampled if sampled else None,
        drifted / len(turns) if drifted is not None and turns else None,
        ", ".join(sorted({draft.engine.server.backend for draft in turns})),
    ]


def _word(value: Any) -> str | None:
    return None if value is None else str(value)
