"""The lines of a folder's index: its first line and one line for each finished rollout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tito_core.ledger.header import REWARD
from tito_core.ledger.ledger import Ledger
from tito_core.store import SchemaError
from tito_core.store.index import uuid_bytes
from tito_core.store.records import UNREADABLE
from tito_core.termination import ANNOTATION

NAME = "index.jsonl"
FORMAT = "strands-tito/collect"
SCHEMA = 1
MAX_SAMPLES = 1 << 16
"""Maximum number of rollouts of one task. The index keeps one bit for each sample up to the highest: at most 8 KiB
for a line."""
_DIGEST = re.compile("[0-9a-f]{16}")
_FILE = re.compile(r"rollouts-(\d{5,9})\.tito")


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


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a collection's file of rollouts."""
    return _FILE.fullmatch(name) is not None


def file_number(file: str) -> int:
    """Return the number in a file's name."""
    match = _FILE.fullmatch(file)
    assert match is not None, file  # `Entry` has checked it
    return int(match[1])
