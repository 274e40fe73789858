"""Each law catches what breaks it, and says where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.drafts import engine_record, make_draft
from tito_core.ledger import CallRecord, LawViolationError, Ledger, VersionSpan, check_ledger
from tito_core.ledger.forest_invariants import PIECE, check_alignment, check_trained_once, count_trained
from tito_core.ledger.trajectory import Trajectory

GOOD = make_draft(None, 0, [100, 101], [200, 201, 202])


def test_the_good_draft_is_good() -> None:
    ledger = Ledger()
    ledger.commit(GOOD)
    check_ledger(ledger)


@pytest.mark.parametrize(
    ("change", "law", "words"),
    [
        ({"prompt_length": 3}, 4, "reported a prompt of 3 tokens, the ledger holds 2"),
        ({"prompt_provenance": np.zeros(1, np.uint8)}, 2, "2 delta ids but 1 provenances"),
        ({"prompt_provenance": np.array([0, 3], np.uint8)}, 3, "delta token 1 has provenance 3"),
        ({"logprobs": np.array([-1, -2], np.float32)}, 2, "3 output ids but 2 logprobs"),
        ({"logprobs": np.array([-1, np.nan, -2], np.float32)}, 4, "logprob nan at output offset 1"),
        ({"logprobs": np.array([-1, -2, -np.inf], np.float32)}, 4, "logprob -inf at output offset 2"),
        ({"logprobs": np.array([-9999, -2, -1], np.float32)}, 4, "logprob -9999.0 at output offset 0"),
        ({"logprobs": np.array([-1, 0.5, -1], np.float32)}, 4, "logprob 0.5 at output offset 1"),
        ({"output_ids": np.array([200, -1, 2], np.int32)}, 2, "output id -1 at offset 1 is negative"),
        ({"prompt_ids": np.array([-5, 1], np.int32)}, 2, "delta id -5 at offset 0 is negative"),
        ({"calls": (CallRecord("look", "ok", 1, 4),)}, 9, "a call spans output tokens 1:4, of 3"),
        ({"calls": (CallRecord("look", "ok", 2, 1),)}, 9, "a call spans output tokens 2:1"),
        ({"engine": engine_record(2)}, 10, "spans end at 2, the output has 3 tokens"),
        ({"engine": engine_record(4)}, 10, "spans end at 4, the output has 3 tokens"),
    ],
)
def test_a_broken_draft_is_refused_and_leaves_no_trace(change: dict[str, object], law: int, words: str) -> None:
    ledger = Ledger()
    with pytest.raises(LawViolationError, match=words) as caught:
        ledger.commit(make_draft(None, 0, [100, 101], [200, 201, 202], **change))
    assert caught.value.law == law
    assert len(ledger) == 0
    assert ledger.retained() == []


@pytest.mark.parametrize(
    "spans",
    [
        (VersionSpan(0, 1, "a"), VersionSpan(2, 3, "b")),
        (VersionSpan(0, 2, "a"), VersionSpan(1, 3, "b")),
        (VersionSpan(1, 3, "a"),),
        (VersionSpan(0, 3, "a"), VersionSpan(3, 2, "b")),
    ],
)
def test_version_spans_must_tile_the_output(spans: tuple[VersionSpan, ...]) -> None:
    broken = replace(GOOD, engine=replace(GOOD.engine, versions=spans))
    with pytest.raises(LawViolationError, match="Law 10"):
        Ledger().commit(broken)


def test_an_unknown_parent_is_refused() -> None:
    with pytest.raises(IndexError):
        Ledger().commit(make_draft(3, 0, [100], [200]))


def _trajectory() -> Trajectory:
    ledger = Ledger()
    ledger.commit(GOOD)
    return ledger.trajectories()[0]


def test_alignment_catches_a_short_column_and_a_misplaced_logprob() -> None:
    good = _trajectory()
    with pytest.raises(LawViolationError, match="column loss_mask has 4 entries for 5"):
        check_alignment(replace(good, loss_mask=good.loss_mask[:4]))
    shifted = np.roll(good.logprobs, -1)
    with pytest.raises(LawViolationError, match="token 1 has provenance 0 and logprob -1"):
        check_alignment(replace(good, logprobs=shifted))
    with pytest.raises(LawViolationError, match="the path hold 10 tokens, the columns 5"):
        check_alignment(replace(good, path=good.path * 2))


def test_training_a_token_twice_or_never_or_a_prompt_is_caught() -> None:
    ledger = Ledger()
    ledger.commit(GOOD)
    good = ledger.trajectories()[0]
    trained: Counter[int] = Counter()
    with pytest.raises(LawViolationError, match="0 of its tokens are trained"):
        check_trained_once(ledger, trained)
    count_trained(good, trained)
    check_trained_once(ledger, trained)
    count_trained(good, trained)
    with pytest.raises(LawViolationError, match="6 of its tokens are trained, expected 3"):
        check_trained_once(ledger, trained)
    with pytest.raises(LawViolationError, match="not report as output"):
        count_trained(replace(good, loss_mask=np.ones(5, np.uint8)), trained)


@given(turns=st.integers(1, 3 * PIECE), data=st.data())
@settings(max_examples=30)
def test_what_is_wrong_is_named_whichever_turn_of_a_long_path_it_is_in(turns: int, data: st.DataObject) -> None:
    drafts = [make_draft(n - 1 if n else None, 5 * n, [100, 101], [200, 201, 202]) for n in range(turns)]
    header = Ledger().header
    check_ledger(Ledger.load(header, drafts, []))
    at = data.draw(st.integers(0, turns - 1))
    wrong, sentence = data.draw(
        st.sampled_from(
            [
                ({"logprobs": np.float32([-1, np.nan, -1])}, "logprob nan at output offset 1"),
                ({"logprobs": np.float32([-1, -1, -9999])}, "logprob -9999.0 at output offset 2"),
                ({"output_ids": np.int32([200, -7, 202])}, "output id -7 at offset 1 is negative"),
                ({"prompt_ids": np.int32([-1, 101])}, "delta id -1 at offset 0 is negative"),
                ({"prompt_provenance": np.uint8([0, 3])}, "delta token 1 has provenance 3"),
            ]
        )
    )
    drafts[at] = make_draft(at - 1 if at else None, 5 * at, [100, 101], [200, 201, 202], **wrong)
    with pytest.raises(LawViolationError, match=f"turn {at}: {sentence}"):
        check_ledger(Ledger.load(header, drafts, []))
