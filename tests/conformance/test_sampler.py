"""The check of the sampler: silent over sound draws of any distribution, and it sees each way to sample otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.defects.defect import Defect
from conformance.defects.sampling import SAMPLING
from conformance.defects.trial import try_defect
from strands_tito.conformance import sampler
from strands_tito.conformance.laws import BrokenLawError, Tally
from strands_tito.conformance.profiles import Profile
from strands_tito.conformance.sampler import FREE, Draw, Question
from support.scripted import tokenizer

SHORT = Profile("short", 1, 1, 2)
"""What follows the conversations is what these tests are about."""
VOCABULARY = 200
LISTED = 20


def drawn(random: np.random.Generator, spread: float, weigh: Any = lambda logits: logits, rows: int = 1_500) -> Draw:
    """Draw each row from a softmax of its own, of which the likeliest tokens are listed.

    Args:
        random: Where everything comes from.
        spread: Standard deviation of the logits.
        weigh: What the sampler makes of a row's logprobs.
        rows: How many.
    """
    logits = random.normal(0, spread, (rows, VOCABULARY))
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    sampled = np.array([weigh(row) for row in logprobs])
    ids = np.argmax(sampled + random.gumbel(size=sampled.shape), axis=1)
    order = np.argsort(-logprobs, axis=1)[:, :LISTED]
    return Draw(ids, logprobs[np.arange(rows), ids], order, np.take_along_axis(logprobs, order, axis=1))


def held(draw: Draw, question: Question = FREE) -> None:
    logits = draw.top_logprobs
    sampler._held(Tally(), question, [draw], [logits], 1.0, np.random.default_rng(0))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.floats(0.5, 4.0))
def test_sound_draws_are_left_alone(seed: int, spread: float) -> None:
    held(drawn(np.random.default_rng(seed), spread))


def cut(keep: int) -> Any:
    return lambda row: np.where(row >= np.sort(row)[-keep], row, -math.inf)


@pytest.mark.parametrize(
    "weigh",
    [
        pytest.param(lambda row: row * 100, id="greedy"),
        pytest.param(lambda row: row / 1.3, id="hot"),
        pytest.param(lambda row: row / 0.75, id="cold"),
        pytest.param(cut(4), id="top_k"),
        pytest.param(lambda row: row * 0, id="uniform"),
    ],
)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_another_distribution_is_noticed(weigh: Any, seed: int) -> None:
    with pytest.raises(BrokenLawError, match="Kolmogorov"):
        held(drawn(np.random.default_rng(seed), 2.0, weigh))


def test_a_policy_that_is_certain_is_not_judged() -> None:
    draw, tally = drawn(np.random.default_rng(0), 400.0), Tally()
    sampler._held(tally, FREE, [draw], [draw.top_logprobs], 1.0, np.random.default_rng(0))
    assert not tally.passed["sampler"]
    assert tally.not_applicable["sampler"]


@settings(max_examples=60)
@given(
    logprobs=st.lists(st.integers(-60, 0), min_size=5, max_size=5),
    name=st.sampled_from([("top_k", 2), ("top_p", 0.5), ("min_p", 0.3)]),
)
def test_what_a_truncation_leaves(logprobs: list[int], name: tuple[str, float]) -> None:
    """Held against the definition, token by token; ties and what lies at the edge may fall either way."""
    kind, value = name
    row = np.array([logprobs]) / 10.0
    row -= np.log(np.exp(row).sum())
    most, least = (sampler._left({kind: value}, row, sign * 0.05, sign * 0.01)[0] for sign in (1, -1))
    order = sorted(range(5), key=lambda index: -row[0, index])
    mass = 0.0
    for rank, index in enumerate(order):
        own = float(np.exp(row[0, index]))
        kept = {"top_k": rank < value, "top_p": mass < value, "min_p": own >= value * np.exp(row[0, order[0]])}[kind]
        assert most[index] or not kept
        assert kept or not least[index]
        mass += own


@pytest.mark.parametrize("defect", SAMPLING, ids=lambda defect: defect.name)
def test_a_planted_defect_is_noticed(defect: Defect) -> None:
    wire = defect.wires[len(defect.name) % len(defect.wires)]
    verdict = try_defect(defect, wire, tokenizer(), int(tokenizer().eos_token_id), SHORT)
    assert verdict.caught_by is not None
    assert verdict.expected, verdict.problem
