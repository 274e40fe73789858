"""Ledgers as JSON and as a pydantic field: the same ledger comes back, and other values are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from support.drafts import drafts, make_draft
from support.refusals import breaks_law
from tito_core import store
from tito_core.ledger import Branch, Column, Ledger, MediaSpan, Reason


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger = Ledger(task_id=draw(st.none() | st.text(max_size=3)), user={"seed": draw(st.integers(0, 9))})
    for _ in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from([None, *range(len(ledger))]))
        ledger.commit(draw(drafts(parent, ledger.path_length(parent))))
    ledger.annotate("reward", draw(st.floats(0, 1)))
    return ledger


class Sample(BaseModel):
    ledger: store.LedgerField


@settings(max_examples=20)
@given(ledgers())
def test_json_round_trip_is_identity(ledger: Ledger) -> None:
    text = json.dumps(store.to_json(ledger), allow_nan=False)
    assert store.encode(store.from_json(json.loads(text))) == store.encode(ledger)
    sample = Sample.model_validate_json(Sample(ledger=ledger).model_dump_json())
    assert store.encode(sample.ledger) == store.encode(ledger)


def test_optional_columns_and_media_come_back() -> None:
    ledger = Ledger()
    extras = {
        "routed_experts": Column.of(0, np.arange(12).reshape(3, 2, 2)),
        "top_logprobs": Column.of(2, np.array([[-0.5, -1.0]])),
    }
    media = (MediaSpan(0, 1, bytes(range(32))),)
    ledger.commit(make_draft(None, 0, [100, 101], [200], extras=extras, media=media))
    again = store.from_json(json.loads(json.dumps(store.to_json(ledger))))
    assert again[0].draft.extras["routed_experts"].values.tolist() == extras["routed_experts"].values.tolist()
    assert again[0].draft.extras["routed_experts"].values.dtype == np.uint8
    assert again[0].draft.media == media


def test_a_field_accepts_a_ledger_and_has_a_schema() -> None:
    ledger = Ledger()
    assert Sample(ledger=ledger).ledger is ledger
    assert Sample.model_json_schema()["properties"]["ledger"]["type"] == "object"


GOOD = Ledger()
GOOD.commit(make_draft(None, 0, [100, 101], [200, 201]))
RECORD: Any = store.to_json(GOOD)
TURN = RECORD["turns"][0]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (3, "int"),
        ({}, "format.*None"),
        ({**RECORD, "schema": 3}, "schema 3.* 2.*upgrade"),
        ({**RECORD, "turns": 3}, "turns"),
        ({**RECORD, "header": {}}, "header.*uuid"),
        ({**RECORD, "turns": [{}]}, "Turn 0.*field"),
        ({**RECORD, "turns": [{**TURN, "sampling": 0}]}, "Turn 0.*turn 0"),
        ({**RECORD, "turns": [TURN, {**TURN, "parent": 1}]}, "turn 1"),
        ({**RECORD, "annotations": [{}]}, "annotation.*field"),
        ({**RECORD, "turns": [{**TURN, "columns": {"prompt_ids": [1]}}]}, "prompt_provenance"),
        ({**RECORD, "turns": [{**TURN, "columns": {**TURN["columns"], "prompt_ids": ["a"]}}]}, "str"),
        ({**RECORD, "turns": [{**TURN, "columns": {**TURN["columns"], "output_ids": [2**40, 1]}}]}, str(2**40)),
        ({**RECORD, "turns": [{**TURN, "columns": {**TURN["columns"], "logprobs": [-1.0]}}]}, "2 output ids.* 1 "),
        ({**RECORD, "turns": [{**TURN, "finish": "vanished"}]}, "vanished"),
    ],
)
def test_other_values_are_refused(record: Any, words: str) -> None:
    with pytest.raises(store.SchemaError, match=words):
        store.from_json(record)
    with pytest.raises(ValidationError):
        Sample.model_validate({"ledger": record})


def test_a_ledger_that_breaks_a_law_is_refused() -> None:
    broken = {**RECORD, "turns": [{**TURN, "columns": {**TURN["columns"], "logprobs": [-1.0, 0.5]}}]}
    with breaks_law(4, "logprob 0.5", "output offset 1"):
        store.from_json(broken)


@pytest.mark.parametrize(
    ("name", "value"), [("stop", "\ud800"), ("stop", 2**70), ("branch", {"reason": "edit", "detail": "\udfff"})]
)
def test_values_that_no_file_can_hold_are_refused(name: str, value: Any) -> None:
    with pytest.raises(store.SchemaError):
        store.from_json({**RECORD, "turns": [{**TURN, name: value}]})


@pytest.mark.parametrize(
    "place",
    [
        ["header"],
        ["annotations", 0],
        ["turns", 0],
        ["turns", 0, "columns"],
        ["turns", 0, "extras", "routed_experts"],
        ["turns", 0, "engine"],
        ["turns", 0, "engine", "server"],
        ["turns", 0, "engine", "server", "semantics"],
        ["turns", 1, "branch"],
    ],
    ids=str,
)
def test_an_unknown_field_is_refused_everywhere(place: list[Any]) -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], extras={"routed_experts": Column.of(0, [[1], [2]])}))
    ledger.commit(make_draft(None, 0, [100], [200], branch=Branch(Reason.SEPARATE)))
    ledger.annotate("reward", 1)
    record = store.to_record(ledger)
    store.from_record(record)
    part: Any = record
    for key in place:
        part = part[key]
    part["later"] = None
    with pytest.raises(store.SchemaError, match="later"):
        store.from_record(record)
