"""Ledgers as plain values and back (law 12): one record for the header, one a turn, one an annotation.

Records hold dicts, lists, str, int, float, bytes and None, so that any carrier takes them. Their fields are those of
the ledger's own classes (`Header`, `Draft`, `Annotation`), which are the schema; one that has its default is left out.
Columns are little-endian bytes, so that a reader in another language needs no numpy. `sampling` and `engine.server` are
either the values or the index of the first turn that has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import msgspec

from tito_core.ledger.header import Annotation, Header
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.strict import plain
from tito_core.ledger.turn import Draft, Sampling, Semantics, Server, Turn
from tito_core.store.twins import ORIGINALS, StoredDraft

FORMAT = "strands-tito/ledger"
SCHEMA = 1

Record = dict[str, Any]
Hook = Callable[[type, Any], Any]
"""Makes a value of a class that the decoder does not know."""
Decoding = Callable[[type[Any], Hook], Callable[[Any], Any]]
"""Makes what reads a record as a class."""
UNREADABLE = (msgspec.MsgspecError, ValueError, IndexError, OverflowError, RecursionError)
"""What decoding a hostile record raises; the callers of this package see a `SchemaError`."""


class SchemaError(ValueError):
    """The record is no ledger, or a newer one than this version reads."""


def to_record(ledger: Ledger, *, engine: bool = True) -> Record:
    """Give a whole ledger as one plain value.

    Args:
        ledger: The ledger.
        engine: Keep each turn's `engine` record. Without it, the same conversation and answers give
            equal records on every backend (law 13); such a record compares, it does not load.
    """
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "header": record_of(ledger.header),
        "turns": [turn_record(turn, engine=engine) for turn in ledger],
        "annotations": [record_of(annotation) for annotation in ledger.annotations],
    }


def from_record(record: Mapping[str, Any]) -> Ledger:
    """Rebuild a ledger, unchecked: `check_ledger` tells whether the laws hold.

    Raises:
        SchemaError: Another format, a schema newer than this version knows, or parts that do not fit together.
    """
    return load_record(record, lambda kind, hook: lambda value: msgspec.convert(value, kind, dec_hook=hook))


def load_record(record: Mapping[str, Any], decoding: Decoding) -> Ledger:
    """Rebuild a ledger whose parts `decoding` reads; the errors are those of `from_record`."""
    if record.get("format") != FORMAT:
        raise SchemaError(f"This is no ledger: its format is {record.get('format')!r}, expected {FORMAT!r}.")
    if record.get("schema") != SCHEMA:
        raise SchemaError(
            f"This ledger has schema {record.get('schema')}, this version of strands-tito reads {SCHEMA}: "
            "upgrade strands-tito to read it."
        )
    for name in ("turns", "annotations"):
        if not isinstance(record.get(name), list):
            raise SchemaError(f"This ledger has no list of {name}.")
    return Loader(decoding).ledger(record.get("header"), record["turns"], record["annotations"])


def turn_record(turn: Turn, *, engine: bool = True) -> Record:
    """Give a turn as a plain value, which refers to earlier turns for what they have in common."""
    draft = turn.draft
    record = record_of(draft)
    record["sampling"] = dict(draft.sampling) if draft.sampling.first == turn.index else draft.sampling.first
    if not engine:
        del record["engine"]
        return record
    server = draft.engine.server
    whole = {"backend": server.backend, "model": server.model, "semantics": record_of(server.semantics)}
    record["engine"]["server"] = whole if server.first == turn.index else server.first
    return record


def record_of(value: Any) -> Record:
    """Give a dataclass, or the twin of one, as a plain value, without the fields that have their default."""
    record = {}
    for name, default, factory in _defaults(value.__class__):
        found = getattr(value, name)
        if found == default or (factory is not None and found == factory()):
            continue
        record[name] = _plain(found)
    return record


def _plain(value: Any) -> Any:
    if is_dataclass(value) or value.__class__ in ORIGINALS:
        return record_of(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any, Callable[[], Any] | None], ...]:
    nothing = object()
    return tuple(
        (
            field.name,
            nothing if field.default is MISSING else field.default,
            None if field.default_factory is MISSING else field.default_factory,
        )
        for field in fields(ORIGINALS.get(kind, kind))
    )


class Loader:
    """Rebuilds one ledger from its records, in the order they were written.

    Args:
        decoding: Makes what reads a record, which is called with a hook for what turns have in common.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._drafts: list[Draft] = []

    def ledger(self, header: Any, turns: Iterable[Any], annotations: Iterable[Any]) -> Ledger:
        """Read all of them.

        Raises:
            SchemaError: They do not have the schema's fields, or do not fit together.
        """
        try:
            begun: Header = self._decoding(Header, self._shared)(header)
            read = self._decoding(StoredDraft, self._shared)
            for record in turns:
                self._drafts.append(read(record))
            said = map(self._decoding(Annotation, self._shared), annotations)
            return Ledger.load(begun, self._drafts, said)
        except UNREADABLE as error:
            raise SchemaError(f"Record {len(self._drafts)} of a ledger cannot be read: {error}") from error

    def _shared(self, kind: type, value: Any) -> Any:
        """Give what a turn has in common with an earlier one, or is the first to have."""
        drafts = self._drafts
        if value.__class__ is not int:
            return _first(kind, value, len(drafts))
        if not 0 <= value < len(drafts):
            raise ValueError(f"It refers to turn {value}, and {len(drafts)} come before it.")
        return drafts[value].sampling if kind is Sampling else drafts[value].engine.server


def expect_readable(turn: Turn, payload: bytes) -> None:
    """Read a turn's payload as a loader would: one that cannot be read back would cost its whole ledger.

    Raises:
        SchemaError: A field is not of the schema's type, such as a request id that is None.
    """
    known = {Sampling: turn.draft.sampling, Server: turn.draft.engine.server}

    def shared(kind: type, value: Any) -> Any:
        return known[kind] if isinstance(value, int) else _first(kind, value, 0)

    try:
        msgspec.msgpack.decode(payload, type=StoredDraft, dec_hook=shared)
    except UNREADABLE as error:
        raise SchemaError(f"Turn {turn.index} could not be read back from a file: {error}") from error


def _first(kind: type, value: Any, index: int) -> Any:
    if kind is Sampling:
        return Sampling(_json_of(msgspec.convert(value, dict[str, Any])), index)
    whole = msgspec.convert(value, _Server)
    return Server(whole.backend, whole.model, whole.semantics, index)


def _json_of(parameters: dict[str, Any]) -> Any:
    """Return sampling parameters as JSON: MessagePack also says bytes, dates and more, which JSON would change."""
    try:
        return plain(parameters, "sampling")
    except TypeError as error:
        raise ValueError(str(error)) from error


class _Server(msgspec.Struct):
    backend: str
    model: str
    semantics: Semantics
