"""TRL: what its trainer gets of a rollout; the trainer itself runs under `make trainers`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from strands_tito.export import BranchedRolloutError, LogprobMismatchError, sample_of
from strands_tito.export.trainer import prompt_response_of
from strands_tito.integrations.trl import columns_of, recorded_reward, rollout_func, sampling_of
from support.multiplying import QUESTION, SAMPLED, make_agent, says
from support.rollout_forests import HOT, chain, grow, rollouts
from support.scripted import backend_of, engine_of, policy_of
from support.trainer_packages import run
from tito_core.ledger import Ledger
from tito_core.termination import Termination, record_termination


def trainer(**more: object) -> SimpleNamespace:
    """Return the arguments that are read from a trainer."""
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    args = SimpleNamespace(**{**given, "max_completion_length": 128, **more})
    return SimpleNamespace(args=args, temperature=args.temperature)


def test_the_trainers_parameters_are_the_policys() -> None:
    found = sampling_of(trainer(temperature=0.7, top_k=20, min_p=0.1))
    assert (found.temperature, found.top_k, found.min_p, found.max_new_tokens) == (0.7, 20, 0.1, 128)
    assert sampling_of(trainer()).top_k == -1
    assert sampling_of(trainer(max_completion_length=None)).max_new_tokens == 2**31 - 1, "no limit"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"presence_penalty": 1.5, "seed": 7}, {"presence_penalty": 1.5, "seed": 7}),
        ({"max_tokens": 9, "min_tokens": 2, "stop": "X"}, {"max_new_tokens": 9, "min_new_tokens": 2, "stop": ("X",)}),
        ({"temperature": 0.5, "top_k": 0, "min_p": None}, {"temperature": 0.5, "top_k": -1, "min_p": 0.0}),
    ],
)
def test_generation_kwargs_override_the_trainers_own_as_in_trl(given: object, found: dict[str, object]) -> None:
    sampling = sampling_of(trainer(generation_kwargs=given, top_k=20))
    assert {name: getattr(sampling, name) for name in found} == found


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs=.*num_beams"),
        ({"generation_kwargs": {"guided_regex": "a+"}}, "generation_kwargs=.*grammar"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.*template_arguments"),
    ],
)
def test_an_argument_that_cannot_be_followed_is_refused(more: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rollout_func(make_agent, policy_of("vllm"))([QUESTION], trainer(**more))


def test_a_rollout_function_gives_a_completion_for_each_prompt() -> None:
    from dataclasses import replace

    policy = replace(policy_of("vllm"), backend=backend_of(engine_of("vllm", says), "vllm"))
    prompts = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}], QUESTION]
    found = rollout_func(make_agent, policy)(prompts, trainer())
    for row in range(2):
        assert [t for t, m in zip(found["completion_ids"][row], found["env_mask"][row], strict=True) if m] == SAMPLED
        assert len(found["logprobs"][row]) == len(found["completion_ids"][row])
    assert len(found["prompt_ids"][0]) != len(found["prompt_ids"][1])
    assert found["termination"] == ["completed", "completed"]
    assert sorted(recorded_reward(found["rollout_reward"], prompts=[])) == [0.0, 1.0]


@settings(max_examples=25)
@given(rollouts())
def test_columns_hold_the_last_path_whole(ledger: Ledger) -> None:
    found = columns_of([ledger], temperature=1.0, end_id=2, branches="last", logprobs="as-recorded")
    sample = sample_of(ledger, branches="last")
    assert found["prompt_ids"][0] + found["completion_ids"][0] == sample.token_ids.tolist()
    mask = [0] * sample.response_length if sample.ended_outside else sample.response_mask.tolist()
    assert found["env_mask"] == [mask]
    start = sample.prompt_length
    expected = [float(v) if m else 0.0 for v, m in zip(sample.logprobs[start:], sample.response_mask, strict=True)]
    assert found["logprobs"] == [expected]
    assert found["rollout_id"] == [ledger.uuid]
    assert found["rollout_reward"] == [None if sample.ended_outside else sample.total]


def test_a_rollout_without_a_turn_is_an_untrained_end() -> None:
    ledger = Ledger()
    record_termination(ledger, Termination.ENGINE_ERROR)
    found = columns_of([ledger], temperature=1.0, end_id=2)
    assert (found["prompt_ids"], found["completion_ids"], found["env_mask"]) == ([[2]], [[2]], [[0]])
    assert found["logprobs"] == [[0.0]]
    assert found["termination"] == ["engine_error"]


def test_branches_and_other_logprobs_are_refused() -> None:
    ledger = chain((3, 2))
    grow(ledger, None, 3, 2)
    with pytest.raises(BranchedRolloutError, match="2 trajectories"):
        columns_of([ledger], temperature=1.0, end_id=2)
    with pytest.raises(LogprobMismatchError, match="TRL compares"):
        columns_of([chain((3, 2), semantics=HOT)], temperature=1.0, end_id=2)
    found = columns_of([chain((3, 2), semantics=HOT)], temperature=1.0, end_id=2, logprobs="omit")
    assert found["logprobs"] is None


@settings(max_examples=25)
@given(rollouts(experts=True))
def test_a_flat_sample_keeps_its_order_under_any_bounds(ledger: Ledger) -> None:
    sample = sample_of(ledger, branches="last")
    for max_prompt_length in (1, 3, 100):
        for max_response_length in (1, 4, 1000):
            flat = prompt_response_of(
                sample,
                trainer="X",
                temperature=1.0,
                logprobs="as-recorded",
                max_prompt_length=max_prompt_length,
                max_response_length=max_response_length,
            )
            ids = flat.prompt_ids + flat.response_ids
            assert ids == sample.token_ids[: len(ids)].tolist()
            assert len(ids) + flat.truncated == len(sample)
            assert len(flat.prompt_ids) == min(max_prompt_length, sample.prompt_length)
            assert len(flat.response_ids) == len(flat.mask) == len(flat.logprobs or [])
            assert flat.truncated == 0 or len(flat.response_ids) == max_response_length
            assert flat.experts is not None
            assert len(flat.experts) == min(len(ids), len(sample) - 1)


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["1.0.0", "1.16.0"])
def test_trls_trainer_takes_a_step_on_what_was_sampled(version: str) -> None:
    output = run("trl_check.py", f"trl-{version}")
    assert f"trl: ok, {version}, " in output.splitlines()[-1]
