"""What a crash left in a folder of rollouts is cut; where the index and the files do not fit otherwise, nothing is.

The process writes one ledger, then its line, so that a crash leaves at most one ledger without a line. A power cut may
take the end of the index or of the newest file, which are synced when a file is full.
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
    """Cut what a crash left, so that the index and the files fit.

    Raises:
        SchemaError: They do not fit in a way that no crash explains. Nothing was changed.
    """
    unnamed = [path for path in folder.glob("*.tito") if is_file_name(path.name) and path.name not in index.ends]
    for path in unnamed:
        _expect_at_most(int(path.name == index.next_file), path, list(_ledger_ends(path)), 0)
    for name, end in index.ends.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size < end and (name != index.newest or not path.exists()):
            raise SchemaError(
                f"{path} has {size} bytes, and the index knows of rollouts in it up to byte {end}: restore it from "
                f"a copy, or choose another folder."
            )
    if index.newest is not None:
        _recover_newest(folder / index.newest, index)
    for path in unnamed:
        path.unlink()  # begun, and no rollout in it was finished


def _recover_newest(path: Path, index: Index) -> None:
    """Cut the newest file after the last ledger that the index names, and the index after the last that is whole."""
    found = _ledger_ends(path)
    whole = max(found.values(), default=0)
    end = 0
    for entry in index.of_file(path.name):
        if entry.end <= whole:
            _expect_end(path, entry.ledger, entry.end, found.get(uuid_bytes(entry.ledger)))
            end = max(end, entry.end)
        elif uuid_bytes(entry.ledger) in found and _is_finished(path, entry.ledger):
            _expect_end(path, entry.ledger, entry.end, found[uuid_bytes(entry.ledger)])
    _expect_at_most(1, path, [uuid for uuid, at in found.items() if at > end], end)
    index.cut(path.name, whole)
    os.truncate(path, end)
    if not end:
        path.unlink()


def _ledger_ends(path: Path) -> dict[bytes, int]:
    """Return the ledgers of a file, each with the offset where its last whole record ends."""
    if path.stat().st_size < len(PREAMBLE):
        return {}
    with path.open("rb") as file:
        expect_preamble(file, path)
        return {frame.uuid: frame.offset + frame.length for frame in frames(file, len(PREAMBLE), path)}


def _is_finished(path: Path, uuid: str) -> bool:
    """Return whether a ledger is whole: its last record is the reason why it ended."""
    with LedgerFile(path) as file:
        return file.load(uuid, check=False).annotation(ANNOTATION) is not None


def _expect_end(path: Path, uuid: str, said: int, found: int | None) -> None:
    if said != found:
        where = "is not in the file" if found is None else f"ends at byte {found}"
        raise SchemaError(
            f"{path.parent / NAME} says that ledger {uuid} ends at byte {said} of {path.name}, and it {where}. "
            f"Nothing was changed: restore {NAME} from a copy, or choose another folder."
        )


def _expect_at_most(most: int, path: Path, ledgers: list[bytes], end: int) -> None:
    if len(ledgers) > most:
        raise SchemaError(
            f"{path} holds {len(ledgers)} rollouts after byte {end} that {NAME} does not name, and a crash leaves at "
            f"most one, in the newest file. Nothing was changed: restore {NAME} from a copy, choose another folder, or "
            f"discard these rollouts with `truncate -s {end} {path}`, and they are run again."
        )
