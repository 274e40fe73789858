"""The check of the sampler: silent over sound draws of any distribution, and it sees each way to sample otherwise."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.defects.defect import SOUND, Defect, plant
from conformance.defects.sampling import SAMPLING
from conformance.defects.trial import try_defect
from support.scripted import tokenizer
from tito_conformance import bets, sampler, suite
from tito_conformance.bets import Places
from tito_conformance.checks import BrokenLawError, Profile, Tally
from tito_conformance.connection import dtype_of
from tito_conformance.sampler import Draw, left, tempered
from tito_conformance.target import Target

pytestmark = pytest.mark.suite

EXAMPLES = int(os.environ.get("TITO_EXAMPLES", "0"))
"""`make suite` takes every eighth defect, `make prove` and `make defects` all."""
SHORT = Profile("short", 1, 1, 2)
"""What follows the conversations is what these tests are about."""
HARDEST = ("penalties-greedy-alone", "top-p-before-top-k", "long-prompts-hotter")
"""The sampling defects with the least evidence at this size, which `make suite` always takes."""
CHOSEN = [each for at, each in enumerate(SAMPLING) if EXAMPLES or at % 8 == 0 or each.name in HARDEST]
VOCABULARY = 200
LISTED = 18


def drawn(random: np.random.Generator, spread: float, weigh: Any = lambda logits: logits, rows: int = 1_500) -> Places:
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
    top = np.take_along_axis(logprobs, order, axis=1)
    draw = Draw(ids, logprobs[np.arange(rows), ids], order, top, np.exp(top).sum(axis=1))
    return draw.places(top, "temperature 1", (), [7])


def judge(places: Places) -> None:
    sampler.judge(Tally(), places, VOCABULARY)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.floats(0.5, 4.0))
def test_sound_draws_are_left_alone(seed: int, spread: float) -> None:
    judge(drawn(np.random.default_rng(seed), spread))


def cut(keep: int) -> Any:
    return lambda row: np.where(row >= np.sort(row)[-keep], row, -math.inf)


@pytest.mark.parametrize(
    "weigh",
    [
        pytest.param(lambda row: row * 100, id="greedy"),
        pytest.param(lambda row: row / 1.2, id="hot"),
        pytest.param(lambda row: row / 0.85, id="cold"),
        pytest.param(cut(4), id="top_k"),
        pytest.param(cut(LISTED), id="top_k of all that are listed"),
        pytest.param(lambda row: row * 0, id="uniform"),
        pytest.param(lambda row: row + np.where(np.arange(VOCABULARY) == 7, 3.0, 0.0), id="ends"),
    ],
)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_another_distribution_is_noticed(weigh: Any, seed: int) -> None:
    with pytest.raises(BrokenLawError, match="bet"):
        judge(drawn(np.random.default_rng(seed), 2.0, weigh, 10_000))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.floats(0.5, 4.0))
def test_no_bet_wins_on_average(seed: int, spread: float) -> None:
    """The mean of every ratio under the stated distribution is 1: the sum over all tokens of probability times it."""
    places = drawn(np.random.default_rng(seed), spread, rows=1)
    k, rest = places.stated.shape[1], float(places.rest[0])
    every = [*range(k), -1]
    wide = Places(
        np.repeat(places.stated, k + 1, axis=0),
        np.array(every, np.intp),
        np.repeat(places.ends, k + 1, axis=0),
        np.repeat(places.seen, k + 1, axis=0),
        np.full(k + 1, math.log(VOCABULARY)),
        {},
    )
    chance = np.array([*places.stated[0], rest])
    for name, logs in bets.log_ratios(wide, VOCABULARY):
        assert float(np.sum(chance * np.exp(logs))) == pytest.approx(1, abs=1e-6), name


E1, E05 = math.e, math.sqrt(math.e)
BETS = {
    "a temperature 2 times as high": [
        [0.4**0.5, 0.2**0.5, 0.1**0.5, 0], [0.8**0.5, 0.1**0.5, 0.06**0.5, 0], [1, 0, 0, 0]
    ],
    "top_k 2": [[0.4, 0.2, 0, 0], [0.8, 0.1, 0, 0], [1, 0, 0, 0]],
    "top_k 3": [[0.4, 0.2, 0.1, 0], [0.8, 0.1, 0.06, 0], [1, 0, 0, 0]],
    "top_p 0.5": [[0.4, 0.2, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]],
    "min_p 0.3": [[0.4, 0.2, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]],
    "min_p 0.1": [[0.4, 0.2, 0.1, 0], [0.8, 0.1, 0, 0], [1, 0, 0, 0]],
    "all but the least likely token that is left": [[0.4, 0.2, 0, 0], [0.8, 0.1, 0, 0], [1, 0, 0, 0]],
    "ends of turn 2.7 times as likely": [[0.4, 0.2 * E1, 0.1, 0], [0.8, 0.1, 0.06, 0], [1, 0, 0, 0]],
    "tokens of the same answer 2.7 times as likely": [
        [0.4, 0.2 * E1, 0.1 * E1, 0], [0.8 * E1, 0.1, 0.06, 0], [1, 0, 0, 0]
    ],
    "tokens 1.6 times as likely for each time that the answer holds them": [
        [0.4, 0.2 * E05, 0.1 * E1, 0], [0.8 * E05, 0.1, 0.06, 0], [1, 0, 0, 0]
    ],
    "any listed token in 50% of all places": [[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]],
    "the likeliest token in 30% of all places": [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]],
}  # fmt: skip
"""What each bet makes of three places, up to a factor for each."""


@pytest.mark.parametrize("name", BETS)
def test_what_a_bet_expects(name: str) -> None:
    stated = np.array([[0.4, 0.2, 0.1, 0], [0.8, 0.1, 0.06, 0], [0.9, 0, 0, 0]])
    ends = np.array([[False, True, False, False]] + [[False] * 4] * 2)
    seen = np.array([[0.0, 1, 2, 0], [1, 0, 0, 3], [0, 0, 0, 0]])
    places = Places(stated, np.zeros(3, np.intp), ends, seen, np.zeros(3), {})
    weigh = bets._nucleus(0.5) if name == "top_p 0.5" else bets.ALTERNATIVES[name][0]
    weights, expected = weigh(places), np.array(BETS[name])
    assert weights / weights.sum(axis=1, keepdims=True) == pytest.approx(expected / expected.sum(axis=1, keepdims=True))


def test_a_policy_that_is_certain_is_not_judged() -> None:
    tally = Tally()
    sampler.judge(tally, drawn(np.random.default_rng(0), 400.0), VOCABULARY)
    assert not tally.passed["sampler"]
    assert tally.not_applicable["sampler"]


@settings(max_examples=60)
@given(
    logprobs=st.lists(st.integers(-60, 0), min_size=5, max_size=5),
    sampling=st.sampled_from([{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.7}]),
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    joint=st.booleans(),
)
def test_what_a_truncation_leaves(
    logprobs: list[int], sampling: dict[str, float], temperature: float, joint: bool
) -> None:
    """Held against the definition, token by token; ties and what lies at the edge may fall either way."""
    row = np.array([logprobs]) / 10.0
    row -= np.log(np.exp(row).sum())
    listed = 3
    order = sorted(range(5), key=lambda index: -row[0, index])
    top = row[:, order[:listed]]
    [may], [must] = left(sampling, tempered(top, temperature, 5), 0.05)
    weights = np.exp(row[0, order] / temperature)
    total = weights.sum() if joint else weights[: int(sampling.get("top_k", 5))].sum()
    mass = 0.0
    for rank in range(listed):
        kept = rank < sampling.get("top_k", 5) and mass < sampling.get("top_p", 2.0)
        kept = kept and weights[rank] >= sampling.get("min_p", 0.0) * weights[0]
        assert may[rank] or not kept
        assert kept or not must[rank]
        mass += weights[rank] / total


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(["bfloat16", "float16", "float32"]))
def test_the_dtype_shows_in_the_grid_of_logprobs(seed: int, dtype: str) -> None:
    logits = np.sort(np.random.default_rng(seed).uniform(4, 30, (8, 20)).astype(np.float32), axis=1)[:, ::-1]
    if dtype == "bfloat16":
        logits = (logits.copy().view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    elif dtype == "float16":
        logits = logits.astype(np.float16).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    assert dtype_of(logprobs.astype(np.float32)) == dtype


def test_the_center_of_differences_is_their_mean_or_their_median() -> None:
    """One large difference hides a bias of all others from the mean, and a bias of few from the median."""
    assert bets.center(np.array([0.1] * 9 + [-0.9])) == pytest.approx(0.1)
    assert bets.center(np.array([0.0] * 6 + [-0.5] * 4)) == pytest.approx(-0.2)


@pytest.mark.parametrize("defect", CHOSEN, ids=lambda defect: defect.name)
def test_a_planted_defect_is_noticed(defect: Defect) -> None:
    wire = defect.wires[len(defect.name) % len(defect.wires)]
    verdict = try_defect(defect, wire, tokenizer(), int(tokenizer().eos_token_id), SHORT)
    assert verdict.caught_by is not None
    assert verdict.expected, verdict.problem


def test_no_two_samples_share_a_seed() -> None:
    """A server may give two prompts with one seed the same random numbers, which the bets would take for evidence."""
    transport = plant(SOUND, "vllm", tokenizer(), int(tokenizer().eos_token_id), varied=True)()
    target = Target("vllm", "http://scripted", tokenizer(), transport=lambda: transport)
    assert suite.run(target, SHORT).sound
    requests = transport.engine.requests  # type: ignore[attr-defined]
    questions = [tuple(tokenizer().encode(text, add_special_tokens=False)) for text in sampler.QUESTIONS]
    asked = [request for request in requests if request.seed is not None and request.max_new_tokens == sampler.TOKENS]
    sampled = [each for each in asked if any(set(text) <= set(each.prompt_ids) for text in questions)]
    assert len(sampled) > 50
    assert len({request.seed for request in sampled}) == len(sampled)
