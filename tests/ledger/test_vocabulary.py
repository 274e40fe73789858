"""Law 15: a tokenizer that is not the server's is refused, and the error shows the difference."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import breaks_law
from tito_core.ledger import Header, LawViolationError, Ledger, VocabularyCheck
from tito_core.ledger.laws import SHOWN_IDS, SHOWN_TEXT, check_same_ids, check_vocab_size
from tito_core.ledger.turn import new_uuid
from tito_core.store import from_record, to_record

IDS = st.lists(st.integers(0, 200_000), max_size=20)
NAMES = {"tokenizer": "mine", "server": "the vllm server of 'm'"}


@settings(max_examples=30)
@given(IDS, IDS, st.text(max_size=80))
def test_only_equal_ids_pass_and_the_error_shows_the_first_difference(
    ours: list[int], theirs: list[int], text: str
) -> None:
    check_same_ids(text, ours, list(ours), **NAMES)
    if ours == theirs:
        return
    with pytest.raises(LawViolationError) as raised:
        check_same_ids(text, ours, theirs, **NAMES)
    message = str(raised.value)
    assert raised.value.law == 15
    assert "'mine'" in message
    assert NAMES["server"] in message
    assert repr(text[:SHOWN_TEXT])[1:-1] in message
    first = next(i for i in range(21) if ours[i : i + 1] != theirs[i : i + 1])
    assert f"token {first} on" in message
    for ids in (ours[first:], theirs[first:]):
        assert f"[{', '.join(map(str, ids[:SHOWN_IDS]))}" in message
    assert len(message) < 700


@settings(max_examples=30)
@given(st.integers(0, 300_000), st.integers(1, 300_000))
def test_a_model_may_have_more_rows_than_ids_but_not_fewer(largest: int, rows: int) -> None:
    check_vocab_size(largest, largest + 1, **NAMES)
    if largest < rows:
        check_vocab_size(largest, rows, **NAMES)
        return
    with breaks_law(15, "'mine'", NAMES["server"], f"up to {largest}", f"{rows} rows"):
        check_vocab_size(largest, rows, **NAMES)


def test_the_header_keeps_the_vocabulary_check_and_refuses_other_values() -> None:
    for check in (*VocabularyCheck, None):
        ledger = Ledger(vocabulary=check)
        record = to_record(ledger)
        assert record["header"].get("vocabulary") == check
        loaded = from_record(record)
        assert loaded.header == ledger.header
        assert loaded.header.vocabulary is check
    with pytest.raises(ValueError, match="surely"):
        Header(new_uuid(), vocabulary="surely")  # type: ignore[arg-type]
