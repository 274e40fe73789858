"""Ledgers in files. Each turn is appended as it is committed; a crash at any byte loses only the unfinished record."""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from tito_core.ledger.ledger import Ledger
from tito_core.store.file import LedgerFile
from tito_core.store.frames import SchemaError
from tito_core.store.records import LedgerField, from_json, from_record, to_json, to_record

__all__ = [
    "LedgerField",
    "LedgerFile",
    "SchemaError",
    "append",
    "encode",
    "from_json",
    "from_record",
    "read",
    "to_json",
    "to_record",
]


def encode(ledger: Ledger, *, engine: bool = True) -> bytes:
    """Encode one ledger canonically: equal ledgers give equal bytes. Law 13 compares them with `engine=False`."""
    return msgspec.msgpack.encode(to_record(ledger, engine=engine), order="deterministic")


def append(path: str | os.PathLike[str], ledgers: Iterable[Ledger]) -> None:
    """Append ledgers to a file and wait until they are on disk. The file is created if it does not exist.

    If the file already has a ledger, only its new turns and annotations are written.

    Raises:
        SchemaError: As `LedgerFile` and `LedgerFile.append`.
    """
    with LedgerFile(path, "a") as file:
        for ledger in ledgers:
            file.append(ledger)
        file.sync()


def read(path: str | os.PathLike[str]) -> list[Ledger]:
    """Read every ledger of a file and check its laws. A torn tail, which a crash leaves, is skipped.

    Raises:
        SchemaError: The file is not a rollout file, is damaged, or was written by a newer version.
        LawViolationError: A ledger in it breaks a law.
    """
    with LedgerFile(path) as file:
        return [file.load(uuid) for uuid in file.uuids]
