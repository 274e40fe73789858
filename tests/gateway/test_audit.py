"""Rows of any forest of calls pass the audit, and any one change to them is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_conformance.gateway.audit import Row, check_extends, check_trained
from tito_conformance.gateway.engine import Call
from tito_conformance.gateway.session import Failed

Columns = tuple[list[int], list[int], list[float | None]]


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Call], list[Columns]]:
    """Draw calls, each of which continues an earlier one or begins, and a row for each path to a last one."""
    calls: list[Call] = []
    parents: list[int | None] = []
    for number in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from([None, *range(number)]))
        added = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        prompt = ([] if parent is None else calls[parent].ids) + added
        output = [100 + number, *draw(st.lists(st.integers(0, 9), max_size=4))]  # no two calls sample the same
        calls.append(Call(number, prompt, output, [-1.0 - number - at / 8 for at, _ in enumerate(output)], {}))
        parents.append(parent)
    rows, done = [], set()  # type: list[Columns], set[int]
    for leaf in sorted({*range(len(calls))} - {*parents}):
        ids = calls[leaf].ids
        mask, logprobs = [0] * len(ids), [None] * len(ids)  # type: list[int], list[float | None]
        at: int | None = leaf
        while at is not None:
            call = calls[at]
            span = slice(len(call.prompt_ids), len(call.ids))
            logprobs[span] = call.logprobs
            mask[span] = [int(at not in done)] * len(call.output_ids)
            done.add(at)
            at = parents[at]
        rows.append((ids, mask, logprobs))
    return calls, rows


def flip(data: Any, row: Columns) -> None:
    at = data.draw(st.integers(0, len(row[1]) - 1))
    row[1][at] = 1 - row[1][at]


def other_id(data: Any, row: Columns) -> None:
    row[0][data.draw(st.integers(0, len(row[0]) - 1))] += 1000


def other_logprob(data: Any, row: Columns) -> None:
    at = data.draw(st.sampled_from([at for at, on in enumerate(row[1]) if on]))
    row[2][at] = data.draw(st.sampled_from([None, 0.0, -0.5]))


def shorter(data: Any, row: Columns) -> None:
    row[data.draw(st.integers(0, 2))].pop()


CHANGES: dict[str, Callable[[Any, Columns], None]] = {
    "a mask value": flip,
    "an id": other_id,
    "a logprob": other_logprob,
    "a column": shorter,
}


def made(rows: list[Columns]) -> list[Row]:
    return [Row(*row) for row in rows]


@given(forests())
def test_what_was_sampled_once_passes(drawn: tuple[list[Call], list[Columns]]) -> None:
    calls, rows = drawn
    check_trained(made(rows), calls, once=True)


@pytest.mark.parametrize("change", CHANGES)
@given(drawn=forests(), data=st.data())
def test_any_one_change_is_noticed(change: str, drawn: tuple[list[Call], list[Columns]], data: Any) -> None:
    calls, rows = drawn
    CHANGES[change](data, data.draw(st.sampled_from(rows)))
    with pytest.raises(Failed):
        check_trained(made(rows), calls, once=True)


@given(forests(), st.data())
def test_a_row_that_is_missing_or_there_twice_is_noticed(drawn: tuple[list[Call], list[Columns]], data: Any) -> None:
    calls, rows = drawn
    row = data.draw(st.sampled_from(rows))
    for other in ([each for each in rows if each is not row], [*rows, row]):
        with pytest.raises(Failed):
            check_trained(made(other), calls, once=True)


class Words:
    """A tokenizer with the two control tokens that the audit asks for."""

    def convert_tokens_to_ids(self, word: str) -> int:
        return {"<|im_start|>": 1, "<|im_end|>": 2}[word]

    def decode(self, ids: list[int]) -> str:
        return str(ids)


BEFORE = Call(0, [1, 7], [5, 6], [], {})


@pytest.mark.parametrize("sampled", [0, 1])
@pytest.mark.parametrize("added", [0, 1, 2])
def test_a_sampled_turn_is_closed_once(sampled: int, added: int) -> None:
    before = replace(BEFORE, output_ids=[5, 6, *[2] * sampled])
    after = replace(before, prompt_ids=[*before.ids, *[2] * added, 8, 1, 7, 2])
    if sampled + added == 1:
        check_extends(before, after, Words())
        return
    with pytest.raises(Failed, match=f"closed {sampled + added} times"):
        check_extends(before, after, Words())


@pytest.mark.parametrize("at", range(4))
def test_a_prompt_that_leaves_what_was_sampled_says_where(at: int) -> None:
    prompt = [*BEFORE.ids, 2, 8, 1, 7]
    prompt[at] += 1000
    for changed in (prompt, BEFORE.ids[:at]):
        with pytest.raises(Failed, match=f"leaves the earlier prompt and samples at token {at} of 4"):
            check_extends(BEFORE, replace(BEFORE, prompt_ids=changed), Words())
