"""Law 15 as functions: what counts as another vocabulary, and what the error says of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_core.ledger import Header, LawViolationError, Ledger, VocabularyCheck
from tito_core.ledger.header import new_uuid
from tito_core.ledger.vocabulary import SHOWN_IDS, SHOWN_TEXT, check_same_ids, check_vocab_size
from tito_core.store import from_record, to_record

IDS = st.lists(st.integers(0, 200_000), max_size=20)
NAMES = {"tokenizer": "mine", "server": "the vllm server of 'm'"}


@given(IDS, IDS, st.text(max_size=200))
def test_only_equal_ids_pass_and_the_error_shows_where_they_part(ours: list[int], theirs: list[int], text: str) -> None:
    if ours == theirs:
        check_same_ids(text, ours, theirs, **NAMES)
        return
    with pytest.raises(LawViolationError) as raised:
        check_same_ids(text, ours, theirs, **NAMES)
    said = str(raised.value)
    assert raised.value.law == 15
    assert "'mine'" in said
    assert NAMES["server"] in said
    assert repr(text[:SHOWN_TEXT])[1:-1] in said
    first = next(i for i in range(21) if ours[i : i + 1] != theirs[i : i + 1])
    assert f"From token {first} on" in said
    for ids in (ours[first:], theirs[first:]):
        assert f"[{', '.join(map(str, ids[:SHOWN_IDS]))}" in said
    assert len(said) < 700


@given(st.integers(0, 300_000), st.integers(1, 300_000))
def test_a_server_may_have_more_rows_than_ids_and_no_fewer(largest: int, rows: int) -> None:
    if largest < rows:
        check_vocab_size(largest, rows, **NAMES)
        return
    with pytest.raises(LawViolationError, match=f"up to {largest}, and the server's model has {rows} rows") as raised:
        check_vocab_size(largest, rows, **NAMES)
    assert raised.value.law == 15


@pytest.mark.parametrize("check", VocabularyCheck)
def test_the_header_keeps_how_they_were_compared(check: VocabularyCheck) -> None:
    ledger = Ledger(vocabulary=check)
    record = to_record(ledger)
    assert record["header"]["vocabulary"] == check.value
    loaded = from_record(record)
    assert loaded.header == ledger.header
    assert loaded.header.vocabulary is check


def test_a_ledger_that_no_policy_made_says_nothing_and_another_word_is_refused() -> None:
    assert Ledger().header.vocabulary is None
    assert "vocabulary" not in to_record(Ledger())["header"]
    with pytest.raises(ValueError, match="surely"):
        Header(new_uuid(), vocabulary="surely")  # type: ignore[arg-type]
