"""Recover a folder of rollouts: remove what a crash or power cut can leave, refuse any other disagreement.

The writer appends one ledger, then its line, so that a crash leaves at most one ledger without a line. A power cut may
take the end of the index or of the newest file, which are flushed to disk when a file is full.
"""

from __future__ import annotations

import os
from pathlib import Path

from strands_tito.collect.entry import NAME, is_file_name
from strands_tito.collect.index import Index
from tito_core.store import LedgerFile, SchemaError
from tito_core.store.frames import PREAMBLE, expect_preamble, frames
from tito_core.store.index import uuid_bytes
from tito_core.termination import ANNOTATION


def recover(folder: Path, index: Index) -> None:
    """Make the index and the files agree by removing what a crash left.

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
