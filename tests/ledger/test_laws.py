"""Each law refuses what breaks it, with the place and the values, and accepts values at its bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.drafts import engine_record, make_draft
from support.refusals import breaks_law
from tito_core.ledger import (
    Annotation,
    Branch,
    CallRecord,
    Column,
    Image,
    Ledger,
    MediaSpan,
    Reason,
    ResponseSpan,
    Trajectory,
    Turn,
    VersionSpan,
    check_ledger,
    columns,
    laws,
)


def spans(*ends: tuple[int, int]) -> Any:
    return replace(engine_record(3), versions=tuple(VersionSpan(start, stop, "v") for start, stop in ends))


def responses(*ends: tuple[int, int]) -> Any:
    return replace(engine_record(3), responses=tuple(ResponseSpan(start, stop, "r") for start, stop in ends))


BROKEN: list[tuple[dict[str, Any], int, list[object]]] = [
    ({"prompt_ids": [-5, 1]}, 2, ["delta id -5", "offset 0"]),
    ({"output_ids": [1, 2, -1]}, 2, ["output id -1", "offset 2"]),
    ({"prompt_provenance": [0, 3]}, 3, ["delta token 1", "provenance 3"]),
    ({"prompt_length": 3}, 4, ["3 tokens", "the ledger holds 2", "0 of the path", "2 of the delta"]),
    ({"logprobs": [-1.0, np.nan, -1.0]}, 4, ["nan", "offset 1"]),
    ({"logprobs": [-np.inf, -1.0, -1.0]}, 4, ["-inf", "offset 0"]),
    ({"logprobs": [-1e300, -1.0, -1.0]}, 4, ["-inf", "offset 0"]),
    ({"logprobs": [-1.0, -1.0, -9999.0]}, 4, ["-9999.0", "offset 2"]),
    ({"logprobs": [-1.0, 0.25, -1.0]}, 4, ["0.25", "offset 1"]),
    ({"calls": (CallRecord("look", "ok", 1, 4),)}, 9, ["1:4", "3"]),
    ({"calls": (CallRecord("look", "ok", -1, 2),)}, 9, ["-1:2"]),
    ({"calls": (CallRecord("look", "ok", 2, 1),)}, 9, ["2:1"]),
    ({"engine": spans((0, 2), (1, 3))}, 10, ["1:3", "offset 2"]),
    ({"engine": spans((0, 1), (2, 3))}, 10, ["2:3", "offset 1"]),
    ({"engine": spans((1, 3))}, 10, ["1:3", "offset 0"]),
    ({"engine": spans((0, 3), (3, 2))}, 10, ["3:2", "offset 3"]),
    ({"engine": spans((0, 2))}, 10, ["end at 2", "3 tokens"]),
    ({"engine": spans((0, 4))}, 10, ["end at 4", "3 tokens"]),
    ({"engine": spans()}, 10, ["end at 0", "3 tokens"]),
    ({"engine": responses((0, 2))}, 4, ["end at 2", "3 tokens"]),
    ({"engine": responses((0, 4))}, 4, ["end at 4", "3 tokens"]),
    ({"engine": responses((1, 3))}, 4, ["1:3", "offset 0"]),
    ({"engine": responses((0, 1), (2, 3))}, 4, ["2:3", "offset 1"]),
    ({"engine": responses((0, 2), (1, 3))}, 4, ["1:3", "offset 2"]),
    ({"engine": responses((0, 0), (0, 3))}, 4, ["0:0", "offset 0"]),
    ({"engine": responses((0, 3), (3, 2))}, 4, ["3:2", "offset 3"]),
    ({"max_new_tokens": -1}, 4, ["max_new_tokens -1"]),
    ({"max_new_tokens": 2**63}, 4, [2**63]),
    ({"engine": replace(engine_record(3), cached_tokens=-1)}, 4, ["cached_tokens -1"]),
    ({"engine": replace(engine_record(3), latency_s=-0.5)}, 4, ["latency", -0.5]),
    ({"engine": replace(engine_record(3), latency_s=np.nan)}, 4, ["latency", "nan"]),
    ({"extras": {"top_ids": Column.of(1, [[1], [2], [3]])}}, 2, ["'top_ids'", "1:4", "2:5"]),
    ({"extras": {"sampling_mask": Column.of(2, [[1], [2]])}}, 2, ["'sampling_mask'", "2:4", "2:5"]),
    ({"extras": {"top_logprobs": Column.of(2, [[-1.0], [-1.0]])}}, 2, ["'top_logprobs'", "2:4", "2:5"]),
    ({"extras": {"top_logprobs": Column.of(2, [[-1.0, -2.0], [-1.0, 0.5], [-1.0, -2.0]])}}, 4, ["0.5", "offset 3"]),
    ({"extras": {"top_logprobs": Column.of(2, [[-1.0, np.nan], [-1.0, -np.inf], [-1.0, -2.0]])}}, 4, ["-inf"]),
    (
        {"extras": {"top_ids": Column.of(2, [[1, 2]] * 3), "top_logprobs": Column.of(2, [[-1.0]] * 3)}},
        2,
        ["(3, 2)", "(3, 1)"],
    ),
    (
        {"extras": {"top_ids": Column.of(2, [[1]] * 3), "top_logprobs": Column.of(2, [[-1.0], [np.nan], [-1.0]])}},
        2,
        ["top_ids", "top_logprobs"],
    ),
    (
        {"extras": {"top_ids": Column.of(2, [[1], [-1], [1]]), "top_logprobs": Column.of(2, [[-1.0]] * 3)}},
        2,
        ["top_ids", "top_logprobs"],
    ),
    ({"extras": {"routed_experts": Column.of(3, [[1], [2], [3]])}}, 2, ["'routed_experts'", "3:6", "5 tokens"]),
    ({"extras": {"routed_experts": Column.of(-1, [[1]])}}, 2, ["'routed_experts'", "-1:0"]),
    ({"media": (MediaSpan(1, 1, bytes(32)), MediaSpan(1, 1, bytes(32)))}, 2, ["1:2", "2:2"]),
    ({"media": (MediaSpan(0, 0, bytes(32)),)}, 2, ["0:0", "0:2"]),
    ({"media": (MediaSpan(1, 2, bytes(32)),)}, 2, ["1:3", "0:2"]),
    ({"media": (MediaSpan(0, 1, bytes(31)),)}, 2, ["31 bytes", "32"]),
    ({"media": (MediaSpan(0, 2, bytes(32), "png", 3, 4),)}, 2, ["image at 0", "[1, 2]", "not one id"]),
    ({"media": (MediaSpan(1, 1, bytes(32), "png", 3, 4),), "prompt_provenance": [0, 1]}, 3, ["image at 1", "PROMPT"]),
    ({"branch": Branch(Reason.EDIT, 0)}, 8, ["first root", "edit, from turn 0"]),
]


@pytest.mark.parametrize(("changes", "law", "values"), BROKEN)
def test_a_draft_that_breaks_a_law_is_refused_and_leaves_no_trace(
    changes: dict[str, Any], law: int, values: list[object]
) -> None:
    ledger, good = Ledger(), make_draft(None, 0, [1, 2], [3, 4, 5])
    draft = make_draft(None, 0, [1, 2], [3, 4, 5], **changes)
    ledger.check(good)  # a check of another draft, or of this one, stands for nothing
    for refuse in (ledger.commit, ledger.commit) if law == 8 else (ledger.check, ledger.commit, ledger.commit):
        with breaks_law(law, "turn 0", *values):
            refuse(draft)
    with breaks_law(4, "9 tokens"):
        ledger.commit(replace(good, prompt_length=9))
    assert len(ledger) == 0
    assert ledger.retained() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": [0, 0], "output_ids": [0, 0, 0]},
        {"prompt_provenance": [2, 2]},
        {"logprobs": [0.0, 0.00009, -9998.0]},
        {"max_new_tokens": 2**63 - 1},
        {"calls": (CallRecord("look", "ok", 0, 3), CallRecord("look", "ok", 3, 3))},
        {"engine": spans((0, 0), (0, 1), (1, 3), (3, 3))},
        {"engine": responses()},
        {"engine": responses((0, 3))},
        {"engine": responses((0, 1), (1, 3))},
        {"extras": {"routed_experts": Column.of(0, [[1]] * 5), "prompt_logprobs": Column.of(1, [np.nan])}},
        {"extras": {"top_ids": Column.of(2, [[1]] * 3), "top_logprobs": Column.of(2, [[-1.0]] * 3)}},
        {"extras": {"top_ids": Column.of(2, [[1, -1]] * 3), "top_logprobs": Column.of(2, [[-1.0, np.nan]] * 3)}},
        {"media": (MediaSpan(0, 1, bytes(32)), MediaSpan(1, 1, bytes(32)))},
    ],
)
def test_a_draft_at_the_bounds_is_committed(changes: dict[str, Any]) -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1, 2], [3, 4, 5], **changes))
    check_ledger(ledger)


def test_a_check_by_another_ledger_stands_for_nothing() -> None:
    one, other = Ledger(), Ledger()
    one.commit(make_draft(None, 0, [1], [2]))
    other.commit(make_draft(None, 0, [1], [2, 3]))
    checked = one.check(make_draft(0, 2, [4], [5]))
    with breaks_law(4, "turn 1"):
        other.commit(checked)
    assert one.commit(checked).index == 1


def test_a_delta_or_an_output_may_be_empty() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1], []))
    ledger.commit(make_draft(0, 1, [], [2]))
    check_ledger(ledger)
    assert ledger.trajectories()[0].token_ids.tolist() == [1, 2]


def test_a_response_is_checked_without_a_turn() -> None:
    with breaks_law(4, "the answer", 1.0, "offset 0"):
        columns.check_logprobs([1.0])
    with breaks_law(10, "the answer", "end at 1", "2 tokens"):
        laws.check_versions([VersionSpan(0, 1, None)], 2)
    with breaks_law(4, "turn 7", "end at 0", "3 tokens"):
        laws.check_responses([], 3, turn=7)
    columns.check_logprobs([])
    laws.check_versions([], 0)


def chain(turns: int) -> Ledger:
    """Return a ledger of one path; each turn adds one prompt token and one output token."""
    ledger = Ledger()
    for index in range(turns):
        ledger.commit(make_draft(index - 1 if index else None, 2 * index, [1], [2]))
    return ledger


def test_a_turns_path_is_its_parents_path_plus_its_own_tokens() -> None:
    ledger = chain(2)
    wrong = replace(ledger[1], path_length=5)
    with breaks_law(1, "turn 1", "5 tokens", "2 of its parent", "2 of its own"):
        laws.check_prefix(ledger, wrong)
    ledger._turns[1] = wrong
    with breaks_law(1, "turn 1"):
        check_ledger(ledger)


def turn_of(parent: int | None, branch: Branch | None) -> Turn:
    return Turn(2, make_draft(parent, 0, [1], [2], branch=branch), 2)


@pytest.mark.parametrize(
    ("parent", "branch", "first", "values"),
    [
        (1, Branch(Reason.EDIT, 0), True, ["the first turn after turn 1", "edit, from turn 0"]),
        (1, None, False, ["not the first turn after turn 1", "no branch"]),
        (None, None, False, ["not the first root", "no branch"]),
        (None, Branch(Reason.EDIT, 2), False, ["from turn 2"]),
        (None, Branch(Reason.EDIT, -1), False, ["from turn -1"]),
    ],
)
def test_a_turn_has_a_branch_record_exactly_where_it_branches(
    parent: int | None, branch: Branch | None, first: bool, values: list[object]
) -> None:
    with breaks_law(8, "turn 2", *values):
        laws.check_branch(turn_of(parent, branch), first=first)
    for earlier in (0, 1):
        laws.check_branch(turn_of(None, Branch(Reason.EDIT, earlier)), first=False)
    laws.check_branch(turn_of(1, None), first=True)


def test_columns_of_a_trajectory_are_aligned() -> None:
    (good,) = chain(2).trajectories()
    for name in ("loss_mask", "logprobs", "provenance"):
        with breaks_law(2, name, "3 entries", "4 token ids"):
            laws.check_alignment(replace(good, **{name: getattr(good, name)[:3]}))
    with breaks_law(2, "token 0", "provenance 0", "logprob -1.0"):
        laws.check_alignment(replace(good, logprobs=np.roll(good.logprobs, -1)))
    with breaks_law(2, "8 tokens", 4):
        laws.check_alignment(replace(good, path=good.path * 2))


def test_each_output_token_is_trained_exactly_once_and_no_other_token() -> None:
    ledger = chain(2)
    (good,) = ledger.trajectories()
    trained: Counter[int] = Counter()
    with breaks_law(3, "turn 0", "0 of its tokens", "expected 1"):
        laws.check_trained_once(ledger, trained)
    laws.count_trained(good, trained)
    laws.check_trained_once(ledger, trained)
    laws.count_trained(good, trained)
    with breaks_law(3, "turn 0", "2 of its tokens", "expected 1"):
        laws.check_trained_once(ledger, trained)
    with breaks_law(3, "turn 1", "2 of its tokens", "expected 1"):
        laws.check_trained_once(ledger, Counter({0: 1, 1: 2}))
    with breaks_law(3, "loss mask"):
        laws.count_trained(replace(good, loss_mask=np.ones(4, np.uint8)), trained)


def test_an_annotation_refers_to_a_turn_of_the_ledger() -> None:
    ledger = chain(2)
    ledger._annotations.append(Annotation("late", 1, 2))
    with breaks_law(8, "'late'", "turn 2", "2 turns"):
        check_ledger(ledger)


def changed(column: Any, index: int, value: float) -> Any:
    return np.where(np.arange(len(column)) == index, value, column)


UNSOUND: dict[str, Callable[[Trajectory], dict[str, Any]]] = {
    "a short mask": lambda t: {"loss_mask": t.loss_mask[1:]},
    "a missing logprob": lambda t: {"logprobs": t.logprobs[:-1]},
    "a missing token": lambda t: {
        "token_ids": t.token_ids[:-1],
        "loss_mask": t.loss_mask[:-1],
        "logprobs": t.logprobs[:-1],
        "provenance": t.provenance[:-1],
    },
    "a missing turn": lambda t: {"path": t.path[:-1]},
    "a logprob of a prompt token": lambda t: {"logprobs": changed(t.logprobs, 5, -1.0)},
    "no logprob of an output token": lambda t: {"logprobs": changed(t.logprobs, 3, np.nan)},
    "a negative id": lambda t: {"token_ids": changed(t.token_ids, 7, -1)},
    "a sentinel": lambda t: {"logprobs": changed(t.logprobs, 3, -9999.0)},
    "a logprob above 0": lambda t: {"logprobs": changed(t.logprobs, 3, 2e-4)},
}


def test_the_fast_check_of_many_turns_agrees_with_the_laws() -> None:
    ledger = Ledger()
    for index in range(3):
        ledger.commit(make_draft(index - 1 if index else None, 5 * index, [0, 2], [3, 0, 5]))
    [whole] = ledger.trajectories()
    assert laws._is_sound(whole)
    at_the_bound = np.where(np.isfinite(whole.logprobs), np.float64(laws.ROUNDING), whole.logprobs)
    assert laws._is_sound(replace(whole, logprobs=at_the_bound))
    for name, change in UNSOUND.items():
        assert not laws._is_sound(replace(whole, **change(whole))), name


@given(turns=st.integers(1, 3 * laws.PIECE), data=st.data())
@settings(max_examples=20)
def test_the_wrong_turn_of_a_long_path_is_named(turns: int, data: st.DataObject) -> None:
    drafts = [make_draft(n - 1 if n else None, 5 * n, [100, 101], [200, 201, 202]) for n in range(turns)]
    header = Ledger().header
    check_ledger(Ledger.load(header, drafts, []))
    index = data.draw(st.integers(0, turns - 1))
    wrong, law, value = data.draw(
        st.sampled_from(
            [
                ({"logprobs": np.float32([-1, np.nan, -1])}, 4, "logprob nan at output offset 1"),
                ({"logprobs": np.float32([-1, -1, -9999])}, 4, "logprob -9999.0 at output offset 2"),
                ({"output_ids": np.int32([200, -7, 202])}, 2, "output id -7 at offset 1"),
                ({"prompt_ids": np.int32([-1, 101])}, 2, "delta id -1 at offset 0"),
                ({"prompt_provenance": np.uint8([0, 3])}, 3, "delta token 1 has provenance 3"),
                ({"prompt_length": 1}, 4, "the engine reported a prompt of 1 tokens"),
            ]
        )
    )
    drafts[index] = make_draft(index - 1 if index else None, 5 * index, [100, 101], [200, 201, 202], **wrong)
    with breaks_law(law, f"turn {index}: {value}"):
        check_ledger(Ledger.load(header, drafts, []))


@pytest.mark.parametrize("kind", ["", 'png","a":"', "image/png", "jpég"])
def test_the_format_of_an_image_is_a_plain_name(kind: str) -> None:
    """It stands in `data:` URLs of requests and pages."""
    with pytest.raises(ValueError, match="format"):
        Image(b"a", kind, 1, 1)


@pytest.mark.parametrize("rest", [b"", b"\0\0\0\rIHDR\0\0\0\5", b"\0\0\0\x0eIHDR\0\0\0\5\0\0\0\7"])
def test_a_png_without_its_size_is_refused(rest: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        Image(b"\x89PNG\r\n\x1a\n" + rest, "png", 5, 7)
