"""A line of the index of a folder of rollouts, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tito_core.store import SchemaError
from tito_core.store.index import uuid_bytes
from tito_core.store.records import UNREADABLE

NAME = "index.jsonl"
FORMAT = "strands-tito/collect"
SCHEMA = 1
MAX_SAMPLES = 1 << 16
"""Most rollouts of one task: the index holds a bit for each up to the highest, so a line costs at most 8 KiB."""
_DIGEST = re.compile("[0-9a-f]{16}")
_FILE = re.compile(r"rollouts-(\d{5,9})\.tito")


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
        if not uuid_bytes(self.ledger):
            raise ValueError(f"ledger is {self.ledger!r}, expected a canonical UUID")
        if min(self.end, self.turns, self.tokens, self.sampled) < 0:
            raise ValueError("end, turns, tokens and sampled must be 0 or more")


_START, _ENTRY = msgspec.json.Decoder(Start), msgspec.json.Decoder(Entry)


def read_start(path: Path) -> Start:
    """Read an index's first line.

    Raises:
        SchemaError: It is no index, or a newer one.
    """
    if path.exists() and not path.is_file():  # a pipe would wait for its writer
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
            f"{path} has format {start.format!r}, schema {start.schema}, this version of strands-tito reads "
            f"{FORMAT!r}, schema {SCHEMA}: upgrade strands-tito to read it."
        )
    return start


def read_entries(path: Path) -> Iterator[tuple[int, Entry]]:
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


def is_file_name(name: str) -> bool:
    """Return whether a collection may have given a file its name."""
    return _FILE.fullmatch(name) is not None


def file_number(file: str) -> int:
    """Return the number in a file's name."""
    found = _FILE.fullmatch(file)
    assert found is not None, file  # entries have no other names
    return int(found[1])
