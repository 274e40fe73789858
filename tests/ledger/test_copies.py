"""Copies of ledgers, trajectories and samples: equal in every column, and independent of the original."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.export import sample_of, samples_of
from strands_tito.export.batch import packed, padded
from strands_tito.export.trainer import trained_turns
from support.drafts import make_draft
from support.rollout_forests import rollouts
from tito_core import store
from tito_core.ledger import LawViolationError, Ledger, Sampling, Server, check_ledger


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.fixture(params=[pickled, copy.deepcopy, copy.copy], ids=["pickle", "deepcopy", "copy"], scope="module")
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


def expect_equal(one: Any, other: Any) -> None:
    """Compare values field by field, and arrays by dtype, shape and bytes."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif is_dataclass(one):
        for field in fields(one):
            expect_equal(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            expect_equal(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            expect_equal(one[name], other[name])
    elif isinstance(one, Sampling | Server):
        for name in type(one).__slots__:
            expect_equal(getattr(one, name), getattr(other, name))
    else:
        assert one == other or one != one  # NaN


@settings(max_examples=25)
@given(rollouts(), st.integers(0, 9))
def test_a_copy_and_its_original_continue_separately(
    copied: Callable[[Any], Any], tmp_path_factory: pytest.TempPathFactory, ledger: Ledger, choice: int
) -> None:
    with store.LedgerFile(tmp_path_factory.mktemp("copy") / "a.tito", "a") as file:
        file.attach(ledger)
        again = copied(ledger)
        assert again.sink is None
        before, size = store.encode(ledger), file.path.stat().st_size
        parent = choice % len(ledger)
        turn = again.commit(make_draft(parent, ledger.path_length(parent), [100], [200]))
        again.annotate("reward", 7)
        assert (store.encode(ledger), file.path.stat().st_size) == (before, size)
        assert (len(again), again[-1], again.annotation("reward")) == (len(ledger) + 1, turn, 7)
        check_ledger(again)
        assert ledger.commit(make_draft(parent, ledger.path_length(parent), [101], [201])).index == turn.index
        assert file.path.stat().st_size > size


def mutable_parts(whole: object) -> dict[int, object]:
    """Return every mutable object that `whole` refers to, by id, except types, functions and enums."""
    mutable: dict[int, object] = {}
    seen, stack = {id(whole)}, [whole]
    while stack:
        part = stack.pop()
        if isinstance(part, type | ModuleType | FunctionType | Enum):
            continue
        if not isinstance(part, str | bytes | int | float | tuple | frozenset | None) and not _is_frozen(part):
            mutable[id(part)] = part
        new = [each for each in gc.get_referents(part) if id(each) not in seen]
        seen.update(map(id, new))
        stack += new
    return mutable


def _is_frozen(part: object) -> bool:
    return is_dataclass(part) and type(part).__dataclass_params__.frozen  # not in typeshed


@settings(max_examples=10)
@given(rollouts())
def test_a_copy_shares_no_mutable_object(copied: Callable[[Any], Any], ledger: Ledger) -> None:
    ledger.annotate("scores", {"parts": [1, 2]})
    again = copied(ledger)
    ours, theirs = mutable_parts(ledger), mutable_parts(again)
    assert ours
    assert [ours[each] for each in ours.keys() & theirs.keys()] == []


@settings(max_examples=10)
@given(rollouts())
def test_samples_of_every_exporter_can_be_copied(copied: Callable[[Any], Any], ledger: Ledger) -> None:
    samples = samples_of(ledger)
    width = max(map(len, samples))
    options: dict[str, Any] = {"trainer": "X", "temperature": 1.0, "logprobs": "as-recorded"}
    made = [
        *samples,
        sample_of(ledger, branches="last"),
        padded(samples, pad_id=0, length=width),
        packed(samples, pad_id=0, length=width),
        *trained_turns(ledger, **options),
    ]
    for sample in made:
        expect_equal(copied(sample), sample)


def test_a_law_violation_can_be_copied(copied: Callable[[Any], Any]) -> None:
    error = LawViolationError(4, "a logprob is missing.")
    again = copied(error)
    assert (type(again), str(again), again.law) == (LawViolationError, "Law 4: a logprob is missing.", 4)
