"""Ledgers as plain values and back (law 12): one record for the header, one per turn, annotation and image.

Records contain only dicts, lists, str, int, float, bytes and None, so that any format can hold them. Their fields are
those of the ledger's own classes (`Header`, `Draft`, `Annotation`), which are the schema; fields with their default
value are left out. Columns are little-endian bytes, so that a reader in another language needs no NumPy. `sampling` and
`engine.server` are either the values or the index of the first turn that has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from tito_core.ledger.columns import Column, Columns
from tito_core.ledger.laws import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import (
    Adapter,
    Annotation,
    Branch,
    Draft,
    EngineRecord,
    Header,
    Image,
    Sampling,
    Semantics,
    Server,
    Turn,
    plain,
)
from tito_core.store.frames import SCHEMA, SchemaError, expect_known

FORMAT = "strands-tito/ledger"
UNREADABLE = (msgspec.MsgspecError, ValueError, IndexError, OverflowError, RecursionError)
"""Errors of decoding a hostile record. Callers of this package see a `SchemaError` instead."""
T = TypeVar("T")
Record = dict[str, Any]


def to_record(ledger: Ledger, *, engine: bool = True) -> Record:
    """Return a whole ledger as one plain value.

    Args:
        ledger: The ledger.
        engine: Keep each turn's `engine` record. Without it, the same conversation and answers give equal records on
            every backend (law 13). Such a record is for comparison only and cannot be loaded.
    """
    annotations = ledger.annotations  # before the turns: other threads may add both
    record = {
        "format": FORMAT,
        "schema": SCHEMA,
        "header": record_of(ledger.header),
        "turns": [turn_record(turn, engine=engine) for turn in ledger],
        "annotations": [record_of(annotation) for annotation in annotations],
    }
    return {**record, "images": [*map(image_record, ledger.images.values())]} if ledger.images else record


def from_record(record: Mapping[str, Any], decode: Callable[[Any], Any] = lambda part: part) -> Ledger:
    """Rebuild a ledger. The laws are not checked; call `check_ledger`.

    Args:
        record: The ledger as `to_record` returns it.
        decode: Converts the record's header, turns and annotations to the form that `to_record` returns.

    Raises:
        SchemaError: The record has another format or a newer schema, or its parts contradict each other.
    """
    if record.get("format") != FORMAT:
        raise SchemaError(f"This is not a ledger: its format is {record.get('format')!r}, expected {FORMAT!r}.")
    expect_known(record.get("schema"), "This ledger")
    lists = {"images": [], **record}
    for name in ("turns", "annotations", "images"):
        if not isinstance(lists.get(name), list):
            raise SchemaError(f"This ledger has no list of {name}.")
    return load(record.get("header"), lists["turns"], lists["annotations"], decode, images=lists["images"])


def to_json(ledger: Ledger) -> Record:
    """Return a ledger as a JSON value for `json.dumps`. A `.tito` file takes a third of the space."""
    record: Record = msgspec.to_builtins(to_record(ledger))
    for turn, written in zip(ledger, record["turns"], strict=True):
        columns = turn.draft.columns
        written["columns"] = {
            "prompt_ids": columns.prompt_ids.tolist(),
            "prompt_provenance": columns.prompt_provenance.tolist(),
            "output_ids": columns.output_ids.tolist(),
            "logprobs": columns.logprobs.tolist(),
        }
    return record


def from_json(record: Any) -> Ledger:
    """Rebuild a ledger from `to_json`'s value, and check its laws.

    Raises:
        SchemaError: The value is not a ledger, has a newer schema, or its parts contradict each other.
        LawViolationError: The ledger breaks a law.
    """
    if not isinstance(record, Mapping):
        raise SchemaError(f"This is not a ledger: it is of type {type(record).__name__}, expected an object.")
    ledger = from_record(record, _decode)
    check_ledger(ledger)
    return ledger


LedgerField = Annotated[
    Ledger,
    PlainValidator(lambda value: value if isinstance(value, Ledger) else from_json(value)),
    PlainSerializer(to_json, return_type=dict[str, Any]),
    WithJsonSchema({"type": "object", "title": "Ledger", "required": ["format", "schema", "header", "turns"]}),
]
"""A ledger as a field of a pydantic model, for environments that pass rollouts between processes."""


def turn_record(turn: Turn, *, engine: bool = True) -> Record:
    """Return a turn as a plain value. It refers to the first turn with the same `sampling` or `engine.server`."""
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


def image_record(image: Image) -> Record:
    """Return an image as a plain value. Its digest is not stored: a loader computes it from the bytes."""
    return {"data": image.data, "format": image.format, "width": image.width, "height": image.height}


def record_of(value: Any) -> Record:
    """Return a dataclass as a plain value, without fields that have their default value."""
    record = {}
    for name, default, factory in _defaults(value.__class__):
        item = getattr(value, name)
        if item == default or (factory is not None and item == factory()):
            continue
        record[name] = _plain(item)
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
    no_default = object()
    return tuple(
        (
            field.name,
            no_default if field.default is MISSING else field.default,
            None if field.default_factory is MISSING else field.default_factory,
        )
        for field in fields(kind)
    )


def load(
    header: Any,
    turns: Iterable[Any],
    annotations: Iterable[Any],
    decode: Callable[[Any], Any] = lambda part: part,
    *,
    images: Iterable[Any] = (),
    base64: bool = True,
) -> Ledger:
    """Rebuild one ledger from its records.

    Args:
        header: The header's record.
        turns: Records of the turns, in commit order.
        annotations: Records of the annotations, in order.
        decode: Converts each record to a plain value.
        images: Records of the images.
        base64: Whether bytes may be base64 strings, as in JSON.

    Raises:
        SchemaError: A record does not match the schema, or records contradict each other.
    """
    drafts: list[Draft] = []

    def shared(kind: type, value: Any) -> Any:
        """Return the sampling or server of a turn: an earlier turn's, or a new one."""
        if value.__class__ is not int:
            return _new_shared(kind, value, len(drafts))
        if not 0 <= value < len(drafts):
            raise ValueError(f"It refers to turn {value}, but only {len(drafts)} turns come before it.")
        return drafts[value].sampling if kind is Sampling else drafts[value].engine.server

    part = "header"
    try:
        own_header = _read(decode(header), Header, base64=base64)
        part = "turn"
        for record in turns:
            drafts.append(_read(decode(record), Draft, shared, base64=base64))  # noqa: PERF401  # `shared` reads the list
        part = "annotation"
        notes = [_read(decode(record), Annotation, base64=base64) for record in annotations]
        part = "image"
        pictures = [_read(decode(record), _Image, base64=base64).image() for record in images]
        part = "forest"
        return Ledger.load(own_header, drafts, notes, pictures)
    except UNREADABLE as error:
        name = f"Turn {len(drafts)}" if part == "turn" else f"The {part}"
        raise SchemaError(f"{name} of a ledger cannot be read: {error}") from error


def expect_readable(turn: Turn, payload: bytes) -> None:
    """Decode a turn's payload as a loader would: one unreadable turn would make the whole ledger unreadable.

    Raises:
        SchemaError: A field does not have the schema's type, such as a request id that is None.
    """
    known = {Sampling: turn.draft.sampling, Server: turn.draft.engine.server}

    def shared(kind: type, value: Any) -> Any:
        return known[kind] if isinstance(value, int) else _new_shared(kind, value, 0)

    try:
        _read(msgspec.msgpack.decode(payload), Draft, shared, base64=False)
    except UNREADABLE as error:
        raise SchemaError(f"Turn {turn.index} could not be read back from a file: {error}") from error


def _read(value: Any, kind: type[T], shared: Callable[[type, Any], Any] | None = None, *, base64: bool) -> T:
    """Convert a plain value to a `kind`; `shared` converts `sampling` and `engine.server`.

    Unknown fields raise, so that a damaged field name or a newer version's field is not silently dropped.
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
        item = value.get(name)
        for each in item.values() if part is Column and isinstance(item, dict) else (item,):
            _expect_known_fields(each, part)


@dataclass(frozen=True, slots=True)
class _Server:
    backend: str
    model: str
    semantics: Semantics


@dataclass(frozen=True, slots=True)
class _Image:
    data: bytes
    format: str
    width: int
    height: int

    def image(self) -> Image:
        """Return the image; its digest is computed."""
        return Image(self.data, self.format, self.width, self.height)


_FIELDS: dict[type, tuple[frozenset[str], tuple[tuple[str, type], ...]]] = {
    kind: (frozenset(field.name for field in fields(kind)), parts)
    for kind, parts in {
        Header: (),
        Annotation: (),
        Columns: (),
        EngineRecord: (),
        Branch: (),
        Adapter: (),
        Column: (),
        Draft: (
            ("columns", Columns),
            ("engine", EngineRecord),
            ("branch", Branch),
            ("extras", Column),
            ("adapter", Adapter),
        ),
        Semantics: (),
        _Server: (("semantics", Semantics),),
        _Image: (),
    }.items()
}
"""Each class's field names, and its fields that are checked in turn; `extras` is a mapping of columns."""


def _new_shared(kind: type, value: Any, index: int) -> Any:
    if kind is Sampling:
        return Sampling(_json_of(msgspec.convert(value, dict[str, Any])), index)
    whole = _read(value, _Server, base64=False)
    return Server(whole.backend, whole.model, whole.semantics, index)


def _json_of(parameters: dict[str, Any]) -> Any:
    """Return sampling parameters as JSON. Raise on types that only MessagePack has, such as bytes and dates."""
    try:
        return plain(parameters, "sampling")
    except TypeError as error:
        raise ValueError(str(error)) from error


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and "columns" in value:
        value = {**value, "columns": _packed(value["columns"])}
    # Raises on a lone surrogate or a number of more than 64 bits: a file could not hold the ledger.
    msgspec.msgpack.encode(value, enc_hook=lambda _: None)
    return value


def _packed(lists: Mapping[str, Any]) -> Record:
    try:
        # NumPy accepts any type: in a list with one long string, every element would take that string's memory.
        columns = Columns.pack(
            msgspec.convert(lists["prompt_ids"], list[int]),
            msgspec.convert(lists["prompt_provenance"], list[int]),
            msgspec.convert(lists["output_ids"], list[int]),
            np.array(msgspec.convert(lists["logprobs"], list[float]), np.float64),  # other languages write 0.0 as 0
        )
    except (KeyError, TypeError, OverflowError, msgspec.ValidationError) as error:
        raise ValueError(f"columns must hold four lists of numbers: {type(error).__name__}: {error}") from error
    record: Record = msgspec.to_builtins({"prompt": columns.prompt, "output": columns.output, "buffer": columns.buffer})
    return record
