"""Ledgers as plain values and back (law 12): one record for the header, one a turn, one an annotation.

Records hold dicts, lists, str, int, float, bytes and None, so that any carrier takes them. Their fields are those of
the ledger's own classes (`Header`, `Draft`, `Annotation`), which are the schema; one that has its default is left out.
Columns are little-endian bytes, so that a reader in another language needs no numpy. `sampling` and `engine.server` are
either the values or the index of the first turn that has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import msgspec

from tito_core.ledger.branch import Branch
from tito_core.ledger.columns import Column, Columns
from tito_core.ledger.header import Annotation, Header
from tito_core.ledger.json_equality import plain
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, EngineRecord, Sampling, Semantics, Server, Turn
from tito_core.store.frames import SCHEMA, SchemaError

FORMAT = "strands-tito/ledger"

T = TypeVar("T")
Record = dict[str, Any]
UNREADABLE = (msgspec.MsgspecError, ValueError, IndexError, OverflowError, RecursionError)
"""What decoding a hostile record raises; the callers of this package see a `SchemaError`."""


def to_record(ledger: Ledger, *, engine: bool = True) -> Record:
    """Return a whole ledger as one plain value.

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


def from_record(record: Mapping[str, Any], plain_of: Callable[[Any], Any] = lambda part: part) -> Ledger:
    """Rebuild a ledger, unchecked: `check_ledger` tells whether the laws hold.

    Args:
        record: The ledger as `to_record` gives it.
        plain_of: Makes the header, a turn or an annotation as it is in `record` what `to_record` gives.

    Raises:
        SchemaError: Another format, a schema newer than this version knows, or parts that do not fit together.
    """
    if record.get("format") != FORMAT:
        raise SchemaError(f"This is not a ledger: its format is {record.get('format')!r}, expected {FORMAT!r}.")
    if record.get("schema") != SCHEMA:
        raise SchemaError(
            f"This ledger has schema {record.get('schema')}, this version of strands-tito reads {SCHEMA}: "
            "upgrade strands-tito to read it."
        )
    for name in ("turns", "annotations"):
        if not isinstance(record.get(name), list):
            raise SchemaError(f"This ledger has no list of {name}.")
    return load(record.get("header"), record["turns"], record["annotations"], plain_of)


def turn_record(turn: Turn, *, engine: bool = True) -> Record:
    """Return a turn as a plain value, which refers to earlier turns for what they have in common."""
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
    """Return a dataclass as a plain value, without the fields that have their default."""
    record = {}
    for name, default, factory in _defaults(value.__class__):
        found = getattr(value, name)
        if found == default or (factory is not None and found == factory()):
            continue
        record[name] = _plain(found)
    return record


def _plain(value: Any) -> Any:
    if is_dataclass(value):
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
        for field in fields(kind)
    )


def load(
    header: Any,
    turns: Iterable[Any],
    annotations: Iterable[Any],
    plain_of: Callable[[Any], Any] = lambda part: part,
    *,
    base64: bool = True,
) -> Ledger:
    """Rebuild one ledger from its records, in the order they were written; `plain_of` decodes each.

    Args:
        base64: Whether bytes may be strings of base64, as in JSON.

    Raises:
        SchemaError: They do not have the schema's fields, or do not fit together.
    """
    drafts: list[Draft] = []

    def shared(kind: type, value: Any) -> Any:
        """Return what a turn has in common with an earlier one, or is the first to have."""
        if value.__class__ is not int:
            return _first(kind, value, len(drafts))
        if not 0 <= value < len(drafts):
            raise ValueError(f"It refers to turn {value}, and {len(drafts)} come before it.")
        return drafts[value].sampling if kind is Sampling else drafts[value].engine.server

    try:
        begun = _read(plain_of(header), Header, base64=base64)
        for record in turns:
            drafts.append(_read(plain_of(record), Draft, shared, base64=base64))  # noqa: PERF401  # which `shared` looks at meanwhile
        notes = [_read(plain_of(record), Annotation, base64=base64) for record in annotations]
        return Ledger.load(begun, drafts, notes)
    except UNREADABLE as error:
        raise SchemaError(f"Record {len(drafts)} of a ledger cannot be read: {error}") from error


def expect_readable(turn: Turn, payload: bytes) -> None:
    """Read a turn's payload as a loader would: one that cannot be read back would cost its whole ledger.

    Raises:
        SchemaError: A field is not of the schema's type, such as a request id that is None.
    """
    known = {Sampling: turn.draft.sampling, Server: turn.draft.engine.server}

    def shared(kind: type, value: Any) -> Any:
        return known[kind] if isinstance(value, int) else _first(kind, value, 0)

    try:
        _read(msgspec.msgpack.decode(payload), Draft, shared, base64=False)
    except UNREADABLE as error:
        raise SchemaError(f"Turn {turn.index} could not be read back from a file: {error}") from error


def _read(value: Any, kind: type[T], shared: Callable[[type, Any], Any] | None = None, *, base64: bool) -> T:
    """Make a plain value a `kind`; `shared` makes what turns have in common.

    A field that `kind` does not have raises: what a damaged name or a newer version says is not dropped in silence.
    """
    _expect_known_fields(value, kind)
    return msgspec.convert(value, kind, dec_hook=shared, builtin_types=None if base64 else (bytes,))


def _expect_known_fields(value: Any, kind: type) -> None:
    if not isinstance(value, dict):
        return
    known, parts = _FIELDS[kind]
    if not known >= value.keys():
        raise ValueError(f"Unknown fields {sorted(map(str, value.keys() - known))} of {kind.__name__}.")
    for name, part in parts:
        found = value.get(name)
        for each in found.values() if part is Column and isinstance(found, dict) else (found,):
            _expect_known_fields(each, part)


@dataclass(frozen=True, slots=True)
class _Server:
    backend: str
    model: str
    semantics: Semantics


_FIELDS: dict[type, tuple[frozenset[str], tuple[tuple[str, type], ...]]] = {
    kind: (frozenset(field.name for field in fields(kind)), parts)
    for kind, parts in {
        Header: (),
        Annotation: (),
        Columns: (),
        EngineRecord: (),
        Branch: (),
        Column: (),
        Draft: (("columns", Columns), ("engine", EngineRecord), ("branch", Branch), ("extras", Column)),
        Semantics: (),
        _Server: (("semantics", Semantics),),
    }.items()
}
"""The names of each class's fields, and its parts that are checked, too; of columns there is a mapping."""


def _first(kind: type, value: Any, index: int) -> Any:
    if kind is Sampling:
        return Sampling(_json_of(msgspec.convert(value, dict[str, Any])), index)
    whole = _read(value, _Server, base64=False)
    return Server(whole.backend, whole.model, whole.semantics, index)


def _json_of(parameters: dict[str, Any]) -> Any:
    """Return sampling parameters as JSON: MessagePack also says bytes, dates and more, which JSON would change."""
    try:
        return plain(parameters, "sampling")
    except TypeError as error:
        raise ValueError(str(error)) from error
