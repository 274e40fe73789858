"""Ledger to plain values and back (law 12), by the schema in `records`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tito_core.ledger.branch import Branch, Reason
from tito_core.ledger.columns import Column, Columns
from tito_core.ledger.header import Annotation, Header
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.records import (
    FORMAT,
    SCHEMA,
    AnnotationRecord,
    BranchRecord,
    ColumnRecord,
    HeaderRecord,
    LedgerRecord,
    SemanticsRecord,
    ServerRecord,
    TurnRecord,
)
from tito_core.ledger.turn import CallRecord, Draft, EngineRecord, Finish, MediaSpan, Semantics, Turn, VersionSpan


class SchemaError(ValueError):
    """The record is no ledger, or a newer one than this version reads."""


def to_record(ledger: Ledger, *, engine: bool = True) -> LedgerRecord:
    """Give a whole ledger as one plain value.

    Args:
        ledger: The ledger.
        engine: Keep each turn's `engine` record. Without it, the same conversation and answers give
            equal records on every backend (law 13); such a record compares, it does not load.
    """
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "header": header_record(ledger.header),
        "turns": [turn_record(turn, engine=engine) for turn in ledger],
        "annotations": [annotation_record(annotation) for annotation in ledger.annotations],
    }


def from_record(record: LedgerRecord) -> Ledger:
    """Rebuild a ledger, unchecked: `check_ledger` tells whether the laws hold.

    Raises:
        SchemaError: Another format, a schema newer than this version knows, or parts that do not fit together.
    """
    if record.get("format") != FORMAT:
        raise SchemaError(f"This is no ledger: its format is {record.get('format')!r}, expected {FORMAT!r}.")
    if record.get("schema") != SCHEMA:
        raise SchemaError(
            f"This ledger has schema {record.get('schema')}, this version of strands-tito reads {SCHEMA}: "
            "upgrade strands-tito to read it."
        )
    return assemble(record["header"], record["turns"], record["annotations"])


def assemble(header: HeaderRecord, turns: Sequence[TurnRecord], annotations: Iterable[AnnotationRecord] = ()) -> Ledger:
    """Rebuild a ledger from its records, in the order they were written.

    Raises:
        SchemaError: They do not fit together.
    """
    drafts: list[Draft] = []
    try:
        for record in turns:
            drafts.append(_draft(record, drafts))
        return Ledger.load(
            Header(**header),
            drafts,
            [Annotation(**annotation) for annotation in annotations],
            max((record.get("call_ids", 0) for record in turns), default=0),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SchemaError(
            f"Turn {len(drafts)} of ledger {header.get('uuid')} cannot be read: {type(error).__name__}: {error}"
        ) from error


def header_record(header: Header) -> HeaderRecord:
    """Give a header as a plain value."""
    record: HeaderRecord = {"uuid": header.uuid}
    if header.group_id is not None:
        record["group_id"] = header.group_id
    if header.task_id is not None:
        record["task_id"] = header.task_id
    if header.tokenizer is not None:
        record["tokenizer"] = header.tokenizer
    if header.user:
        record["user"] = dict(header.user)
    return record


def annotation_record(annotation: Annotation) -> AnnotationRecord:
    """Give an annotation as a plain value."""
    record: AnnotationRecord = {"name": annotation.name, "value": annotation.value}
    if annotation.turn is not None:
        record["turn"] = annotation.turn
    return record


def turn_record(turn: Turn, *, engine: bool = True) -> TurnRecord:
    """Give a turn as a plain value, which refers to earlier turns for what they have in common."""
    draft = turn.draft
    record: TurnRecord = {
        "prompt": draft.columns.prompt,
        "output": draft.columns.output,
        "columns": draft.columns.buffer,
        "reported": draft.prompt_length,
        "finish": draft.finish.value,
        "fingerprint": draft.fingerprint,
        "sampling": dict(draft.sampling) if turn.sampling_of == turn.index else turn.sampling_of,
        "max_new_tokens": draft.max_new_tokens,
    }
    if draft.parent is not None:
        record["parent"] = draft.parent
    if draft.stop is not None:
        record["stop"] = draft.stop
    if turn.call_ids:
        record["call_ids"] = turn.call_ids
    if draft.calls:
        record["calls"] = [(call.name, call.status, call.start, call.stop, call.reason) for call in draft.calls]
    if draft.constrained:
        record["constrained"] = True
    if not draft.reasoning_closed:
        record["reasoning_open"] = True
    if draft.branch is not None:
        record["branch"] = _branch_record(draft.branch)
    if draft.extras:
        record["extras"] = {name: _column_record(draft.extras[name]) for name in sorted(draft.extras)}
    if draft.media:
        record["media"] = [(span.offset, span.length, span.sha256) for span in draft.media]
    if engine:
        _add_engine(record, draft.engine, turn.server_of if turn.server_of != turn.index else None)
    return record


def _add_engine(record: TurnRecord, engine: EngineRecord, server: int | None) -> None:
    whole = ServerRecord(
        backend=engine.backend,
        model=engine.model,
        semantics=_semantics_record(engine.semantics),
    )
    record["server"] = whole if server is None else server
    record["request"] = engine.request_id
    record["latency_s"] = engine.latency_s
    if engine.cached_tokens is not None:
        record["cached"] = engine.cached_tokens
    record["versions"] = [(span.stop, span.version) for span in engine.versions]


def _semantics_record(semantics: Semantics) -> SemanticsRecord:
    return {
        "processed": semantics.processed,
        "temperature": semantics.temperature,
        "adjusted": semantics.adjusted,
        "source": semantics.source,
    }


def _branch_record(branch: Branch) -> BranchRecord:
    record: BranchRecord = {"reason": branch.reason.value}
    if branch.turn is not None:
        record["turn"] = branch.turn
    if branch.message is not None:
        record["message"] = branch.message
    if branch.detail:
        record["detail"] = branch.detail
    return record


def _column_record(column: Column) -> ColumnRecord:
    values = column.values.astype(column.values.dtype.newbyteorder("<"), copy=False)
    return {
        "start": column.start,
        "dtype": values.dtype.str,
        "shape": list(values.shape),
        "data": values.tobytes(),
    }


def _draft(record: TurnRecord, before: Sequence[Draft]) -> Draft:
    sampling = record["sampling"]
    branch = record.get("branch")
    return Draft(
        parent=record.get("parent"),
        columns=Columns(record["prompt"], record["output"], record["columns"]),
        constrained=record.get("constrained", False),
        prompt_length=record["reported"],
        finish=Finish(record["finish"]),
        stop=record.get("stop"),
        fingerprint=record["fingerprint"],
        sampling=sampling if isinstance(sampling, Mapping) else _first(before, sampling).sampling,
        max_new_tokens=record["max_new_tokens"],
        calls=tuple([CallRecord(*call) for call in record.get("calls", ())]),
        engine=_engine(record, before),
        reasoning_closed=not record.get("reasoning_open", False),
        branch=None if branch is None else _branch(branch),
        extras={name: _column(column) for name, column in record.get("extras", {}).items()},
        media=tuple([MediaSpan(*span) for span in record.get("media", ())]),
    )


def _branch(record: BranchRecord) -> Branch:
    return Branch(Reason(record["reason"]), record.get("turn"), record.get("message"), record.get("detail", ""))


def _first(before: Sequence[Draft], index: int) -> Draft:
    if not 0 <= index < len(before):
        raise SchemaError(f"It refers to turn {index}, of {len(before)} before it.")
    return before[index]


def _engine(record: TurnRecord, before: Sequence[Draft]) -> EngineRecord:
    server = record["server"]
    if isinstance(server, Mapping):
        backend, model, semantics = server["backend"], server["model"], Semantics(**server["semantics"])
    else:
        like = _first(before, server).engine
        backend, model, semantics = like.backend, like.model, like.semantics
    spans, at = [], 0
    for stop, version in record["versions"]:
        spans.append(VersionSpan(at, stop, version))
        at = stop
    return EngineRecord(
        backend, model, record["request"], record["latency_s"], record.get("cached"), semantics, tuple(spans)
    )


def _column(record: ColumnRecord) -> Column:
    return Column(record["start"], np.frombuffer(record["data"], record["dtype"]).reshape(record["shape"]))
