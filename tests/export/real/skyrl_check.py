"""Rollouts as SkyRL's `GeneratorOutput`, through its own check and into the tensors that it trains on.

SkyRL 0.4.0 asks for Python 3.12: on an older one pydantic takes only the newer `TypedDict`, which stands in here.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import tempfile
import typing
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors  # noqa: E402
from skyrl.train.generators.base import GeneratorOutput, TrajectoryID  # noqa: E402
from skyrl.train.generators.utils import concatenate_generator_outputs, prepare_generator_input  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402

from strands_tito.export import BranchedRolloutError, LogprobMismatchError, TrainingSample, samples_of  # noqa: E402
from strands_tito.export.kept import kept_logprobs  # noqa: E402
from strands_tito.export.skyrl import STOP_REASON, generator_output_of  # noqa: E402
from support.drafts import make_draft  # noqa: E402
from support.kept_sets import sampled  # noqa: E402
from support.multiplying import ANSWER, QUESTION  # noqa: E402
from support.rollout_forests import HOT, REWARDS, chain, group_of_one_prompt, grow, rollouts  # noqa: E402
from support.scripted import END, Says, engine_of, ids_of, tokenizer  # noqa: E402
from tito_conformance.testing import ScriptedServer  # noqa: E402
from tito_core.ledger import Column, Ledger  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from skyrl_generator import StrandsGenerator  # noqa: E402

PAD = 0
SAID = ids_of(ANSWER + END)
TENSORS = inspect.signature(convert_prompts_responses_to_batch_tensors).parameters
CHECKS = inspect.signature(validate_generator_output).parameters
OPTIONS: dict[str, Any] = {"temperature": 1.0, "end_id": 2, "logprobs": "as-recorded"}
seen = 0


def rewarded(ledger: Ledger) -> Ledger:
    if len(ledger) and samples_of(ledger)[0].reward is None:
        ledger.annotate("reward", 0.5)
    return ledger


def in_steps(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Return those that train no token first: of one agent, and with a reward, they are told apart by nothing else."""
    return [sample for trains in (False, True) for sample in samples if sample.loss_mask.any() == trains]


def at_the_end(output: Any) -> list[torch.Tensor]:
    """Return the rewards of each row's tokens, as SkyRL's trainer does: one number a row is that of the last token."""
    found = [torch.zeros(len(ids)) for ids in output["response_ids"]]
    for row, value in zip(found, output["rewards"], strict=True):
        if isinstance(value, list):
            row[:] = torch.tensor(value)
        else:
            row[-1] = value
    return found


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(rollouts(most_turns=4, experts=True), min_size=1, max_size=3))
def rows_are_trained_as_sampled(ledgers: list[Ledger]) -> None:
    global seen
    names = [TrajectoryID(instance_id=f"task-{n}", repetition_id=0) for n in range(len(ledgers))]
    output = generator_output_of(
        [rewarded(ledger) for ledger in ledgers], trajectory_ids=names, branches="steps", **OPTIONS
    )
    assert set(output) == set(GeneratorOutput.__annotations__)
    samples = [one for ledger in ledgers for one in in_steps(samples_of(ledger))]
    trained = any(sample.loss_mask.any() and not sample.ended_outside for sample in samples)
    if all(len(sample) > 1 for sample in samples):
        checks = {"routes_expected": trained} if "routes_expected" in CHECKS else {}  # 0.4.0 has it
        validate_generator_output(len(ledgers), output, step_wise=True, **checks)
    tensors = convert_prompts_responses_to_batch_tensors(
        PAD if "pad_token_id" in TENSORS else SimpleNamespace(pad_token_id=PAD),  # 0.3.0 takes the tokenizer
        output["prompt_token_ids"],
        output["response_ids"],
        at_the_end(output),
        output["loss_masks"],
        output["rollout_logprobs"],
        output["rollout_expert_indices"],
    )
    sequences, attention, _, rewards, masks, logprobs, *_ = tensors
    assert logprobs is not None
    for row, sample in enumerate(samples):
        seen += 1
        assert sequences[row][attention[row].bool()].tolist() == sample.token_ids.tolist()
        size = sample.response_length
        mask = np.zeros(size, bool) if sample.ended_outside else sample.response_mask.astype(bool)
        assert masks[row, masks.shape[1] - size :].tolist() == mask.tolist()
        assert int(masks[row].sum()) == mask.sum()
        recorded = logprobs[row, logprobs.shape[1] - size :].numpy()[mask]
        np.testing.assert_array_equal(recorded, sample.logprobs[sample.prompt_length :][mask])
        expected = np.zeros(size) if sample.credit is None else sample.credit[sample.prompt_length :].copy()
        expected[-1] += sample.reward or 0.0
        assert rewards[row, -size:].tolist() == (0 * expected if sample.ended_outside else expected).tolist()
        assert output["stop_reasons"][row] == STOP_REASON[sample.termination]
        routes = output["rollout_expert_indices"][row]
        if len(sample) > 1:
            np.testing.assert_array_equal(routes, sample.routed_experts[:-1])  # type: ignore[index]
    assert sum(output["is_last_step"] or []) == len(ledgers)


def a_row_a_rollout() -> None:
    ledgers = [rewarded(chain((3, 2), (1, 2))), rewarded(chain((2, 2)))]
    output = generator_output_of(ledgers, **OPTIONS)
    validate_generator_output(2, output)
    assert output["rewards"] == [0.5, 0.5]
    assert output["loss_masks"] == [[1, 1, 0, 1, 1], [1, 1]]
    assert output["is_last_step"] is None
    empty = generator_output_of([ledgers[0], Ledger()], **OPTIONS)
    validate_generator_output(2, empty)
    assert (empty["response_ids"][1], empty["loss_masks"][1], empty["rewards"][1]) == ([2], [0], 0.0)


def a_whole_group_is_trained_without_its_bad_rows() -> None:
    """SkyRL has no place for "without a reward": as the page says, such a row counts as 0 in its group's baseline."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage

    output = generator_output_of(group_of_one_prompt(), branches="last", **OPTIONS)
    validate_generator_output(6, output)
    assert output["rewards"] == [*REWARDS, 0.0, 0.0, 0.0]
    assert [any(mask) for mask in output["loss_masks"]] == [True] * 3 + [False] * 3
    if "env_metrics" in output:
        assert [row.get("group_id") for row in output["env_metrics"] or []] == ["g"] * 6
    sizes = [len(ids) for ids in output["response_ids"]]
    rewards, mask = torch.zeros(6, max(sizes)), torch.zeros(6, max(sizes))
    for row, size in enumerate(sizes):
        rewards[row, size - 1] = output["rewards"][row]
        mask[row, :size] = torch.tensor(output["loss_masks"][row])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["g"] * 6))
    every = torch.tensor([*REWARDS, 0.0, 0.0, 0.0])
    expected = (every - every.mean()) / (every.std() + 1e-6)
    assert torch.allclose(advantages, expected[:, None] * mask)


def kept_sets_are_skyrls() -> None:
    """SkyRL checks and packs them, and torch's logprobs over them are those that were sampled."""
    truth = sampled(3, 3, top=12, mask=True, top_k=4)
    options = {**OPTIONS, "logprobs": "checked", "replays": True}
    with pytest.raises(LogprobMismatchError, match="SkyRL has no place for kept sets, or does not replay them"):
        generator_output_of([truth.ledger], **{**options, "replays": False})
    if "rollout_sample_support" not in GeneratorOutput.__annotations__:
        with pytest.raises(LogprobMismatchError, match="SkyRL has no place for kept sets"):
            generator_output_of([truth.ledger], **options)
        return
    output: Any = generator_output_of([truth.ledger, rewarded(chain((3, 2)))], **options)
    validate_generator_output(2, output)
    *_, packed = convert_prompts_responses_to_batch_tensors(
        PAD if "pad_token_id" in TENSORS else SimpleNamespace(pad_token_id=PAD),
        output["prompt_token_ids"],
        output["response_ids"],
        at_the_end(output),
        output["loss_masks"],
        output["rollout_logprobs"],
        rollout_sample_support=output["rollout_sample_support"],
    )
    rows = packed.segment(0)
    mask = torch.tensor(output["loss_masks"][0]).bool()
    assert [row[row >= 0].tolist() for row in rows[mask]] == truth.kept
    assert (packed.segment(1) == -1).all()
    np.testing.assert_allclose(np.array(output["rollout_logprobs"][0])[mask.numpy()], truth.over_kept, atol=2e-4)


def outputs_of_several_calls_are_joined() -> None:
    """SkyRL's fully async trainer joins the groups of a batch, each from a call of its own."""
    judged, failed = rewarded(chain((3, 2))), Ledger()
    judged.annotate("reward", 0.25, turn=0)
    found: list[Any] = []
    for group, ledgers in enumerate(([judged], [rewarded(chain((2, 2)))], [chain((2, 2)), chain((2, 2))], [failed])):
        ids = [TrajectoryID(str(group), number) for number in range(len(ledgers))]
        found.append(generator_output_of(ledgers, trajectory_ids=ids, token_rewards=True, **OPTIONS))
    assert concatenate_generator_outputs(found)["rewards"] == [[0.0, 0.75], [0.0, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0]]
    routed = Ledger()
    values = np.arange(4)[:, None, None] + np.arange(4).reshape(1, 2, 2)
    routed.commit(make_draft(None, 0, [100] * 3, [200] * 2, extras={"routed_experts": Column.of(0, values)}))
    found = [generator_output_of([each], experts=(2, 2), **OPTIONS) for each in (rewarded(routed), failed)]
    experts = concatenate_generator_outputs(found)["rollout_expert_indices"]
    assert [np.shape(each) for each in experts or []] == [(4, 2, 2), (1, 2, 2)]
    if "rollout_sample_support" not in GeneratorOutput.__annotations__:
        return
    options = {**OPTIONS, "logprobs": "checked", "replays": True}
    narrow, wide = (sampled(seed, 2, top=12, mask=True, top_k=6, top_p=p).ledger for seed, p in ((1, 0.5), (2, 0.95)))
    found = [generator_output_of([ledger], top_k=6, **options) for ledger in (narrow, wide, failed)]
    joined = concatenate_generator_outputs(found)
    *_, packed = convert_prompts_responses_to_batch_tensors(
        PAD,
        joined["prompt_token_ids"],
        joined["response_ids"],
        at_the_end(joined),
        joined["loss_masks"],
        joined["rollout_logprobs"],
        rollout_sample_support=joined["rollout_sample_support"],
    )
    assert packed.values.shape[1] == 6
    assert (packed.segment(2) == -1).all()
    with pytest.raises(ValueError, match="top_k is 2, but the largest kept set has 6 tokens"):
        generator_output_of([wide], top_k=2, **options)


def advantages(output: Any, *, step_wise: bool, estimator: str = "grpo", last: bool = False) -> list[float]:
    """Return what SkyRL's own trainer makes of the rewards: the advantage of each row's first or last token."""
    sizes = [len(ids) for ids in output["response_ids"]]
    tensors = {name: torch.zeros(len(sizes), max(sizes)) for name in ("rewards", "response_mask", "values")}
    for row, values in enumerate(at_the_end(output)):
        tensors["rewards"][row, : sizes[row]] = values
        tensors["response_mask"][row, : sizes[row]] = torch.tensor(output["loss_masks"][row])
    batch = TrainingInputBatch(tensors)
    batch.metadata = {"uids": [name.instance_id for name in output["trajectory_ids"]], "avg_response_length": 1.0}
    batch.metadata["is_last_step"] = output["is_last_step"]
    config = SkyRLTrainConfig()
    config.generator.step_wise_trajectories = step_wise
    config.trainer.algorithm.advantage_estimator = estimator
    trainer: Any = SimpleNamespace(cfg=config, all_metrics={})
    found = RayPPOTrainer.compute_advantages_and_returns(trainer, batch)
    places = [
        size - 1 if last else int(torch.nonzero(row)[0, 0])
        for size, row in zip(sizes, found["advantages"], strict=True)
    ]
    return [round(float(row[place]), 4) for row, place in zip(found["advantages"], places, strict=True)]


def the_last_row_is_all_that_step_wise_training_reads() -> None:
    """As the page says: rewards of turns on other rows change nothing, and where those of the last row are neither."""
    found = []
    for early, late in ((0.0, 0.0), (5.0, 0.0), (0.0, 0.25)):
        ledgers = [chain((3, 2)), chain((3, 2))]
        for ledger, reward in zip(ledgers, (1.0, 0.0), strict=True):
            grow(ledger, None, 3, 2)
            ledger.annotate("reward", reward - late)
            ledger.annotate("reward", early, turn=0)
            ledger.annotate("reward", late, turn=1)
        ids = [TrajectoryID("task", number) for number in range(2)]
        output = generator_output_of(ledgers, trajectory_ids=ids, branches="steps", **OPTIONS)
        found.append(advantages(output, step_wise=True))
    assert found == [[0.7071, 0.7071, -0.7071, -0.7071]] * 3


def each_place_is_read_by_an_estimator_of_tokens() -> None:
    """GRPO reads the sum of a row; REINFORCE++ reads what is left after each token."""
    found = {}
    for estimator, place in product(("grpo", "reinforce++"), (0, 1)):
        ledgers = [chain((3, 2), (1, 2)), chain((3, 2), (1, 2))]
        ledgers[0].annotate("reward", 1.0, turn=place)
        ledgers[1].annotate("reward", 0.0, turn=place)
        ids = [TrajectoryID("task", number) for number in range(2)]
        output = generator_output_of(ledgers, trajectory_ids=ids, **OPTIONS)
        found[estimator, place] = advantages(output, step_wise=False, estimator=estimator, last=True)
    assert found["grpo", 0] == found["grpo", 1]
    assert found["reinforce++", 0] != found["reinforce++", 1]


def logprobs_are_read_where_an_off_policy_correction_is_set() -> None:
    config = SkyRLTrainConfig().trainer.algorithm.off_policy_correction
    loss, mask = torch.ones(1, 2), torch.ones(1, 2)
    for ratio, expected in ((None, [1.0, 1.0]), ("token", [2.0, 0.5])):
        config.tis_ratio_type = ratio
        recorded = -torch.log(torch.tensor([[2.0, 0.5]]))
        corrected, *_ = apply_off_policy_correction(loss, torch.zeros(1, 2), recorded, mask, config)
        torch.testing.assert_close(corrected[0], torch.tensor(expected))


def the_examples_generator_is_skyrls() -> None:
    """SkyRL's trainer asks it for a batch, checks what comes, and makes tensors of it."""
    config = SkyRLTrainConfig()
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 64}
    rows = [
        {"prompt": [{"role": "user", "content": QUESTION}], "env_class": None, "env_extras": {"answer": answer},
         "uid": answer}
        for answer in ("425", "426")
    ]  # fmt: skip
    with ScriptedServer(engine_of("vllm", Says(*[ANSWER] * 16))) as server, tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        generator = StrandsGenerator(SimpleNamespace(get_endpoint_url=lambda: server.base_url), folder)
        trainer: Any = SimpleNamespace(cfg=config, generator=generator, all_metrics={})
        for phase in ("train", "eval"):
            batch, uids = prepare_generator_input(rows, 2, sampling, "none", phase, 1)
            output = asyncio.run(RayPPOTrainer.generate(trainer, batch))
            generator.policy = None  # the next loop needs connections of its own
            assert output["rewards"] == [1.0, 1.0, 0.0, 0.0]
            assert uids == ["425", "425", "426", "426"]
            assert [ids[-len(SAID) :] for ids in output["response_ids"]] == [SAID] * 4
            assert (output["rollout_logprobs"] is None) is (phase == "eval")
            assert all(sum(mask) == len(SAID) for mask in output["loss_masks"])


def torch_takes_gradients_over_kept_sets() -> None:
    """As NumPy's values; a logit outside the set has no gradient."""
    (sample,) = samples_of(sampled(3, 3, top=12, mask=True, top_k=4).ledger)
    assert sample.kept is not None
    scores = torch.randn(len(sample), 12, dtype=torch.float64, requires_grad=True)
    ids = np.where(sample.loss_mask, sample.token_ids, 0)
    values = kept_logprobs(scores, ids, sample.kept)
    np.testing.assert_allclose(values.detach(), kept_logprobs(scores.detach().numpy(), ids, sample.kept))
    values.sum().backward()
    for row, kept in zip(scores.grad, sample.kept.padded(), strict=True):
        inside = kept[kept >= 0] if (kept >= 0).any() else np.arange(12)
        assert set(torch.nonzero(row)[:, 0].tolist()) <= set(inside.tolist())
        assert torch.isfinite(row).all()


def what_cannot_be_said_is_refused() -> None:
    with pytest.raises(LogprobMismatchError, match="SkyRL compares"):
        generator_output_of([rewarded(chain((3, 2), semantics=HOT))], **{**OPTIONS, "logprobs": "checked"})
    ledger = rewarded(chain((3, 2), (1, 2)))
    grow(ledger, 0, 2, 2)
    with pytest.raises(BranchedRolloutError):
        generator_output_of([ledger], **OPTIONS)
    with pytest.raises(ValueError, match="None of the rollouts has a reward"):
        generator_output_of([chain((3, 2))], **OPTIONS)
    with pytest.raises(ValueError, match="trajectory_ids"):
        generator_output_of([ledger], branches="steps", **OPTIONS)
    assert generator_output_of([rewarded(chain((3, 2)))], **{**OPTIONS, "logprobs": "omit"})["rollout_logprobs"] is None


if __name__ == "__main__":
    rows_are_trained_as_sampled()
    a_row_a_rollout()
    kept_sets_are_skyrls()
    outputs_of_several_calls_are_joined()
    torch_takes_gradients_over_kept_sets()
    what_cannot_be_said_is_refused()
    a_whole_group_is_trained_without_its_bad_rows()
    the_last_row_is_all_that_step_wise_training_reads()
    each_place_is_read_by_an_estimator_of_tokens()
    logprobs_are_read_where_an_off_policy_correction_is_set()
    the_examples_generator_is_skyrls()
    print(f"skyrl: ok, {version('skyrl')}, {seen} rows")
