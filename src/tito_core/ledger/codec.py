"""Ledger to plain values and back (law 12), ready for msgpack or any other carrier.

Arrays become little-endian bytes, so a reader in another language needs no numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import CallRecord, Draft, EngineRecord, Finish, Semantics, Turn, VersionSpan

FORMAT = "strands-tito/ledger"
SCHEMA = 1


class SchemaError(ValueError):
    """The record is no ledger, or a newer one than this version reads."""


def to_record(ledger: Ledger, *, engine: bool = True) -> dict[str, Any]:
    """Turn a ledger into dicts, lists, str, int, float, bytes and None.

    Args:
        ledger: The ledger.
        engine: Keep each turn's `engine` record. Without it, the same conversation and answers give
            equal records on every backend (law 13); such a record compares, it does not load.
    """
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "uuid": ledger.uuid,
        "call_ids": ledger.call_ids,
        "turns": [_turn_record(turn, engine) for turn in ledger],
    }


def from_record(record: Mapping[str, Any]) -> Ledger:
    """Rebuild a ledger; every turn passes `commit` again, so a damaged record raises.

    Raises:
        SchemaError: Another format, or a schema newer than this version knows.
        LawViolationError: The content breaks a law.
    """
    if record.get("format") != FORMAT:
        raise SchemaError(f"This is no ledger: its format is {record.get('format')!r}, expected {FORMAT!r}.")
    if record.get("schema") != SCHEMA:
        raise SchemaError(
            f"This ledger has schema {record.get('schema')}, this version of strands-tito reads {SCHEMA}: "
            "upgrade strands-tito to read it."
        )
    ledger = Ledger(record["uuid"])
    for turn in record["turns"]:
        ledger.commit(_draft(turn))
    ledger.resume_call_ids(record["call_ids"])
    return ledger


def _turn_record(turn: Turn, engine: bool) -> dict[str, Any]:
    draft = turn.draft
    record: dict[str, Any] = {
        "parent": draft.parent,
        "prompt_ids": _pack(draft.prompt_ids, "<i4"),
        "prompt_provenance": _pack(draft.prompt_provenance, "u1"),
        "output_ids": _pack(draft.output_ids, "<i4"),
        "logprobs": _pack(draft.logprobs, "<f4"),
        "constrained": draft.constrained,
        "prompt_length": draft.prompt_length,
        "finish": str(draft.finish),
        "stop": draft.stop,
        "fingerprint": draft.fingerprint,
        "sampling": dict(draft.sampling),
        "calls": [asdict(call) for call in draft.calls],
    }
    if engine:
        record["engine"] = asdict(draft.engine)
    return record


def _draft(record: Mapping[str, Any]) -> Draft:
    return Draft(
        parent=record["parent"],
        prompt_ids=_unpack(record["prompt_ids"], "<i4"),
        prompt_provenance=_unpack(record["prompt_provenance"], "u1"),
        output_ids=_unpack(record["output_ids"], "<i4"),
        logprobs=_unpack(record["logprobs"], "<f4"),
        constrained=record["constrained"],
        prompt_length=record["prompt_length"],
        finish=Finish(record["finish"]),
        stop=record["stop"],
        fingerprint=record["fingerprint"],
        sampling=record["sampling"],
        calls=tuple(CallRecord(**call) for call in record["calls"]),
        engine=_engine_record(record["engine"]),
    )


def _engine_record(record: Mapping[str, Any]) -> EngineRecord:
    fields = dict(record)
    fields["semantics"] = Semantics(**fields["semantics"])
    fields["versions"] = tuple(VersionSpan(**span) for span in fields["versions"])
    return EngineRecord(**fields)


def _pack(array: np.ndarray, dtype: str) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _unpack(data: bytes, dtype: str) -> np.ndarray:
    array = np.frombuffer(data, dtype)
    return array if sys.byteorder == "little" else array.astype(array.dtype.newbyteorder("="))
