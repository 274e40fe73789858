"""HashPolicy is a real distribution, and scoring gives the logprobs that sampling reported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tito_conformance.testing import HashPolicy, ScriptedRequest, ScriptError
from tito_conformance.testing.policy import _mix
from tito_conformance.testing.script import mix64, settle
from tito_conformance.testing.wire import bracketed

pytestmark = pytest.mark.suite

FEW = settings(max_examples=30)
VOCAB, EOS = 300, (2, 7)
POLICY = HashPolicy(VOCAB, eos_ids=EOS)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40).map(tuple)
temperatures = st.sampled_from([0.3, 0.7, 1.0, 1.7, 2.0])


def make_request(prompt: Sequence[int], **fields: object) -> ScriptedRequest:
    settings = {"max_new_tokens": 30, "eos_ids": EOS, "vocab_size": VOCAB, **fields}
    return ScriptedRequest(tuple(prompt), **settings)  # type: ignore[arg-type]


@FEW
@given(prompts, st.integers(0, 2**40), temperatures, temperatures)
def test_scoring_a_sequence_gives_exactly_what_sampling_reported(
    prompt: tuple[int, ...], seed: int, temperature: float, reported: float
) -> None:
    request = make_request(prompt, seed=seed, temperature=temperature, reported_temperature=reported)
    answer = settle(POLICY, request, bracketed)
    whole = [*prompt, *answer.output_ids]
    assert POLICY.score(whole, 1, reported)[len(prompt) - 1 :] == list(answer.logprobs)
    assert settle(POLICY, request, bracketed).output_ids == answer.output_ids


@settings(max_examples=8)
@given(prompts, temperatures)
def test_the_probabilities_of_all_ids_add_up_to_one(prompt: tuple[int, ...], temperature: float) -> None:
    total = sum(math.exp(POLICY.score([*prompt, i], len(prompt), temperature)[0]) for i in range(VOCAB))
    assert total == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=8)
@given(prompts, temperatures, st.integers(1, 20))
def test_top_agrees_with_score(prompt: tuple[int, ...], temperature: float, k: int) -> None:
    top = POLICY.top([*prompt, 0], len(prompt), k, temperature)
    scores = {i: POLICY.score([*prompt, i], len(prompt), temperature)[0] for i in range(VOCAB)}
    assert all(scores[i] == logprob for i, logprob in top)
    assert [logprob for _, logprob in top] == sorted(scores.values(), reverse=True)[:k]
    assert len({i for i, _ in top}) == k


@FEW
@given(prompts)
def test_greedy_takes_the_most_likely_token(prompt: tuple[int, ...]) -> None:
    first = POLICY(make_request(prompt, temperature=0.0)).output_ids[0]
    assert first == POLICY.top([*prompt, 0], len(prompt), 1, 1.0)[0][0]


@FEW
@given(prompts, st.integers(0, 1000), st.integers(1, 3))
def test_top_k_and_top_p_leave_only_the_likely(prompt: tuple[int, ...], seed: int, k: int) -> None:
    likely = [i for i, _ in POLICY.top([*prompt, 0], len(prompt), k, 1.0)]
    assert POLICY(make_request(prompt, seed=seed, top_k=k)).output_ids[0] in likely
    assert POLICY(make_request(prompt, seed=seed, top_p=1e-6)).output_ids[0] == likely[0]
    best = POLICY.top([*prompt, 0], len(prompt), 1, 1.0)[0][1]
    taken = POLICY(make_request(prompt, seed=seed, min_p=1.0)).output_ids[0]
    assert POLICY.score([*prompt, taken], len(prompt), 1.0) == [best]  # several may be as likely


def test_samples_follow_the_distribution() -> None:
    prompt, draws = (5, 6, 7, 8), 4000
    seen = Counter(POLICY(make_request(prompt, seed=n, max_new_tokens=1)).output_ids[0] for n in range(draws))
    for token, logprob in POLICY.top([*prompt, 0], len(prompt), 8, 1.0):
        assert seen[token] / draws == pytest.approx(math.exp(logprob), abs=0.03)


@FEW
@given(prompts, st.integers(0, 1000))
def test_eos_ends_an_answer_unless_ignored_or_too_early(prompt: tuple[int, ...], seed: int) -> None:
    output = POLICY(make_request(prompt, seed=seed)).output_ids
    assert not set(output[:-1]) & set(EOS)
    assert len(output) == 30 or output[-1] in EOS
    assert not set(POLICY(make_request(prompt, seed=seed, ignore_eos=True)).output_ids) & set(EOS)
    assert len(POLICY(make_request(prompt, seed=seed, min_new_tokens=12)).output_ids) >= 12


def test_an_alphabet_bounds_sampling_but_not_scoring() -> None:
    policy = HashPolicy(VOCAB, alphabet=range(100, 120), eos_ids=EOS)
    output = policy(make_request([1, 2, 3], seed=3, max_new_tokens=200, temperature=2.0)).output_ids
    assert set(output) <= {*range(100, 120), *EOS}
    assert all(math.isfinite(score) for score in policy.score(list(range(VOCAB)), 1, 1.0))


def test_without_a_seed_the_number_decides() -> None:
    first, again, second = (POLICY(make_request([9, 9], number=n, ignore_eos=True)).output_ids for n in (0, 0, 1))
    assert first == again
    assert first != second


def test_a_grammar_and_a_small_alphabet_raise() -> None:
    with pytest.raises(ScriptError, match="grammar"):
        POLICY(make_request([1], grammar={"regex": "a"}))
    with pytest.raises(ValueError, match="3 ids; HashPolicy needs more than 8"):
        HashPolicy(3)


@FEW
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_both_mixers_agree(values: list[int]) -> None:
    assert _mix(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]
