"""Ledgers as JSON and as a pydantic field: the same ledger comes back, and other values are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from support.drafts import drafts, make_draft
from support.refusals import breaks_law
from tito_core import store
from tito_core.ledger import Branch, Column, Ledger, Reason, check_ledger
from tito_core.ledger.turn import Turn


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


GOOD = Ledger()
GOOD.commit(make_draft(None, 0, [100, 101], [200, 201]))
RECORD: Any = store.to_json(GOOD)
TURN = RECORD["turns"][0]


def with_turn(**changes: Any) -> Any:
    return {**RECORD, "turns": [{**TURN, **changes}]}


def with_column(name: str, values: Any) -> Any:
    return with_turn(columns={**TURN["columns"], name: values})


COLUMN = r"Turn 0.*(columns|provenance|delta ids)"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (3, "int"),
        ({}, "format.*None"),
        ({**RECORD, "format": "other"}, "'other'"),
        ({**RECORD, "schema": 3}, "schema 3.* 2: upgrade"),
        *(({name: RECORD[name] for name in RECORD if name != part}, part) for part in ("turns", "annotations")),
        ({**RECORD, "turns": 3}, "turns"),
        ({**RECORD, "header": {}}, "header.*uuid"),
        ({**RECORD, "header": None}, "header"),
        ({**RECORD, "turns": [{}]}, "Turn 0.*field"),
        (with_turn(sampling=0), "Turn 0.*turn 0"),
        ({**RECORD, "turns": [TURN, {**TURN, "parent": 1}]}, "turn 1"),
        ({**RECORD, "annotations": [{}]}, "annotation.*field"),
        (with_turn(finish="vanished"), "vanished"),
        (with_turn(columns={"prompt_ids": [1]}), "prompt_provenance"),
        (with_column("prompt_ids", ["a"]), "str"),
        (with_column("output_ids", [2**40, 1]), str(2**40)),
        (with_column("logprobs", [-1.0]), "2 output ids.* 1 "),
        *((with_column("prompt_ids", ids), COLUMN) for ids in ([1.7, 1], [True, False], [2**31, 1], [2**70, 1])),
        *((with_column("prompt_ids", ids), COLUMN) for ids in ("ab", [[1], [2]])),
        (with_column("prompt_provenance", [0, 256]), COLUMN),
        *((with_column("output_ids", ids), COLUMN) for ids in ([None, 1], {"a": 1})),
        *((with_column("logprobs", values), COLUMN) for values in (["-1.0", "-1.0"], [None, None], [True, True], None)),
        (with_turn(stop="\ud800"), "surrogates"),
        (with_turn(stop=2**70), "Turn 0"),
        (with_turn(branch={"reason": "edit", "detail": "\udfff"}), "surrogates"),
    ],
)
def test_other_values_are_refused(record: Any, words: str) -> None:
    with pytest.raises(store.SchemaError, match=words):
        store.from_json(record)
    with pytest.raises(ValidationError):
        Sample.model_validate({"ledger": record})


def test_a_whole_number_is_a_logprob_and_a_field_accepts_a_ledger() -> None:
    assert store.from_json(with_column("logprobs", [-1, -2]))[0].draft.logprobs.tolist() == [-1.0, -2.0]
    assert Sample(ledger=GOOD).ledger is GOOD
    assert Sample.model_json_schema()["properties"]["ledger"]["type"] == "object"


def test_a_ledger_that_breaks_a_law_is_refused() -> None:
    with breaks_law(4, "logprob 0.5", "output offset 1"):
        store.from_json(with_column("logprobs", [-1.0, 0.5]))


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


@pytest.mark.parametrize("how", ["record", "file"])
def test_a_ledger_that_grows_while_it_is_written_is_whole(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn and its reward may come from another thread at any moment: not the reward without the turn."""
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200]))
    grown, turns = False, Ledger.__iter__

    def growing(self: Ledger) -> Iterator[Turn]:
        nonlocal grown
        yield from [*turns(self)]
        if not grown:
            grown = True
            self.commit(make_draft(0, 2, [101], [201]))
            self.annotate("reward", 1.0, turn=1)

    monkeypatch.setattr(Ledger, "__iter__", growing)
    if how == "record":
        (written,) = [store.from_record(store.to_record(ledger))]
    else:
        store.append(tmp_path / "rollouts.tito", [ledger])
        (written,) = store.read(tmp_path / "rollouts.tito")
    check_ledger(written)
    assert len(ledger) == 2
    assert [note.turn for note in written.annotations if (note.turn or 0) >= len(written)] == []
