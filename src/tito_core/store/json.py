"""Ledgers as JSON, for people and other programs: columns as lists, digests as base64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from tito_core.ledger.columns import Columns
from tito_core.ledger.forest_invariants import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.store.frames import SchemaError
from tito_core.store.records import Record, from_record, to_record


def to_json(ledger: Ledger) -> Record:
    """Return a ledger as a JSON value for `json.dumps`. A `.tito` file takes a third of the space."""
    record: Record = msgspec.to_builtins(to_record(ledger))
    for turn, plain in zip(ledger, record["turns"], strict=True):
        columns = turn.draft.columns
        plain["columns"] = {
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


LedgerField = Annotated[
    Ledger,
    PlainValidator(lambda value: value if isinstance(value, Ledger) else from_json(value)),
    PlainSerializer(to_json, return_type=dict[str, Any]),
    WithJsonSchema({"type": "object", "title": "Ledger", "required": ["format", "schema", "header", "turns"]}),
]
"""A ledger as a field of a pydantic model, for environments that pass rollouts between processes."""
