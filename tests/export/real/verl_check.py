"""Rollouts through verl: its `AgentLoopWorker` makes our loop by Hydra, runs it, pads what comes, and gives a batch."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue
import verl
from hydra.errors import InstantiationException
from hypothesis import given, settings
from omegaconf import OmegaConf
from strands import Agent
from strands.hooks import AfterInvocationEvent
from transformers import BatchFeature
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker, _agent_loop_registry
from verl.experimental.fully_async_policy.detach_utils import RolloutSample, assemble_batch_from_rollout_samples
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator, compute_grpo_outcome_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tensordict_utils import get_tensordict
from verl.workers.rollout.replica import TokenOutput

from strands_tito.export import BranchedRolloutError, ImageGridError, LogprobMismatchError, sample_of, samples_of
from strands_tito.export.verl import output_of, outputs_of
from support import multiplying
from support.multiplying import QUESTION, SAMPLED, says
from support.picture_ledgers import PAD, two_images
from support.rollout_forests import rollouts
from support.scripted import tokenizer
from tito_conformance.testing import ScriptedRequest
from tito_core.ledger import Ledger, check_ledger

PROMPT, RESPONSE = 512, 256


class Servers:
    """Stands in for verl's client: returns verl's own `TokenOutput` with a script's completion."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.steps = 7

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        assert sampling_params["logprobs"] is True
        self.sessions.append(request_id)
        fields = {"prompt_ids", "max_new_tokens", "temperature", "ignore_eos", "scoring"}
        request: Any = SimpleNamespace(
            **dict.fromkeys(ScriptedRequest.__dataclass_fields__.keys() - fields),
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            ignore_eos=False,
            scoring=False,
        )
        ids = list(says(request).output_ids)
        steps = {"global_steps": self.steps, "min_global_steps": self.steps, "max_global_steps": self.steps}
        logprobs = [-0.125 * (1 + place % 7) for place in range(len(ids))]
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=steps)


def worker_of(
    agent: str, temperature: float = 1.0, response: int = RESPONSE, of: type = AgentLoopWorker, **more: Any
) -> tuple[Any, Servers]:
    """Return verl's worker, without the model, the processor and the reward model that it would load."""
    loaded, servers = tokenizer(), Servers()
    loaded.pad_token = loaded.pad_token or loaded.eos_token
    rollout = {
        "name": "vllm",
        "prompt_length": PROMPT,
        "response_length": response,
        "max_model_len": None,
        "logprobs_mode": "processed_logprobs",
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "calculate_log_probs": True,
        "val_kwargs": {"temperature": 0.6, "top_p": 0.7, "top_k": 20},
        "agent": {"default_agent_loop": "strands", "num_workers": 1},
        "multi_turn": {"max_parallel_calls": 1, "format": "hermes"},
        "full_determinism": False,
    }
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout, "model": {}}, "data": {"apply_chat_template_kwargs": {}}}
    )
    worker = of.__new__(of)
    for name, value in {
        "config": config,
        "llm_client": servers,
        "teacher_client": None,
        "reward_loop_worker_handles": None,
        "rollout_config": config.actor_rollout_ref.rollout,
        "tokenizer": loaded,
        "processor": None,
        "hf_model_type": "llama",
        "mm_processor_kwargs": {},
        "dataset_cls": RLHFDataset,
        "distillation_enabled": False,
        "tools": [],
    }.items():
        setattr(worker, name, value)
    _agent_loop_registry["strands"] = {
        "_target_": "strands_tito.integrations.verl_loop.StrandsAgentLoop",
        "agent": f"{__name__ if agent in globals() else 'support.multiplying'}:{agent}",
        **more,
    }
    return worker, servers


def batch_of(worker: Any, size: int, prompts: Any = None, **more: Any) -> DataProto:
    questions = [QUESTION] * size if prompts is None else [f"{kind}. {QUESTION}" for kind in prompts]
    prompts = np.empty(size, dtype=object)
    prompts[:] = [[{"role": "user", "content": question}] for question in questions]
    batch = DataProto.from_dict(
        tensors={"dummy": torch.zeros(size, 1)},
        non_tensors={"raw_prompt": prompts, "index": np.arange(size)},
        meta_info={"global_steps": 7, **more},
    )
    found: DataProto = asyncio.run(worker.generate_sequences(batch))
    return found


def verls_worker_runs_our_loop() -> None:
    multiplying.ledgers.clear()
    worker, servers = worker_of("make_agent")
    found = batch_of(worker, 3)
    assert len(found) == 3
    assert len(multiplying.ledgers) == 3
    assert sorted(set(servers.sessions)) == sorted(ledger.uuid for ledger in multiplying.ledgers)
    ledgers = {ledger.uuid: ledger for ledger in multiplying.ledgers}
    for row in range(3):
        ledger = ledgers[found.non_tensor_batch["rollout_id"][row]]
        check_ledger(ledger)
        sample = sample_of(ledger)
        mask = found.batch["response_mask"][row].bool()
        assert found.batch["responses"][row][mask].tolist() == SAMPLED
        whole = found.batch["input_ids"][row][found.batch["attention_mask"][row].bool()]
        assert whole.tolist() == sample.token_ids.tolist()
        kept = found.batch["rollout_log_probs"][row][mask]
        assert torch.equal(kept, torch.from_numpy(sample.logprobs[sample.loss_mask.astype(bool)]))
        assert not found.batch["rollout_log_probs"][row][~mask].any()
        positions = found.batch["position_ids"][row][found.batch["attention_mask"][row].bool()]
        assert positions.tolist() == list(range(len(sample)))
        assert found.batch["rm_scores"][row].sum() == sample.reward
        assert found.non_tensor_batch["termination"][row] == "completed"
        assert found.non_tensor_batch["max_global_steps"][row] == 7
        assert {turn.draft.engine.versions[0].version for turn in ledger} == {"7"}
        assert found.non_tensor_batch["__num_turns__"][row] == 4


def what_ends_early_or_is_too_long_keeps_its_shape() -> None:
    multiplying.ledgers.clear()
    worker, _ = worker_of("make_failing_agent")
    failed = batch_of(worker, 2)
    assert list(failed.non_tensor_batch["termination"]) == ["tool_error"] * 2
    assert (failed.batch["response_mask"].sum(-1) > 0).all()
    worker, _ = worker_of("make_agent", response=20)
    short = batch_of(worker, 1)
    assert short.batch["responses"].shape == (1, 20)
    assert short.batch["response_mask"].sum() == 20
    assert list(short.non_tensor_batch["termination"]) == ["truncated"]
    worker, _ = worker_of("make_agent", response=45)
    longer = batch_of(worker, 1)
    assert longer.batch["responses"].shape == (1, 45)
    assert longer.non_tensor_batch["cut"][0] > 0


def what_verl_cannot_take_is_refused() -> None:
    worker, _ = worker_of("make_editing_agent")
    with pytest.raises(BranchedRolloutError, match="2 trajectories"):
        batch_of(worker, 1)
    worker, _ = worker_of("make_editing_agent", branches="last")
    assert batch_of(worker, 1).batch["response_mask"].sum() > 0
    worker, _ = worker_of("make_editing_agent", branches="lists")
    with pytest.raises(InstantiationException, match=r"branches is 'lists', expected one of 'list', 'last', 'error'\."):
        batch_of(worker, 1)
    worker, _ = worker_of("make_agent", temperature=0.5)
    assert batch_of(worker, 1).batch["response_mask"].sum() > 0  # processed, at the temperature that verl uses
    worker.rollout_config["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(LogprobMismatchError, match="verl compares"):
        batch_of(worker, 1)


def a_validation_is_sampled_as_it_likes() -> None:
    """Nothing of it is trained, so that its logprobs may be of a truncated policy at another temperature."""
    worker, servers = worker_of("make_agent")
    found = batch_of(worker, 2, validate=True)
    assert (found.batch["response_mask"].sum(-1) == len(SAMPLED)).all()
    assert servers.sessions
    worker, _ = worker_of("make_agent")
    worker.rollout_config["top_p"] = 0.7
    with pytest.raises(LogprobMismatchError, match="verl compares"):
        batch_of(worker, 1)


def a_whole_group_keeps_its_rewards() -> None:
    """The engine ends a rollout before its first turn, another after it, and one records no reward.

    verl's fully async trainer assembles the batch too: it counts with the steps of every row.
    """
    multiplying.ledgers.clear()
    worker, servers = worker_of("make_group_agent", branches="last")
    good, asked = servers.generate, itertools.count()

    async def generate(*args: Any, **more: Any) -> Any:
        text = tokenizer().decode(more["prompt_ids"])
        if ("NOTHING" in text) or ("BROKEN" in text and "425" in text):
            next(asked)
            raise RuntimeError("engine core died")
        return await good(*args, **more)

    servers.generate = generate  # type: ignore[method-assign]
    kinds = ["1.0", "0.0", "0.5 BRANCH", "0.0 BROKEN", "NONE", "NOTHING"]
    found = batch_of(worker, 6, prompts=kinds)
    assert next(asked) == 2
    scores = found.batch["rm_scores"].sum(-1).tolist()
    assert scores == [1.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    ends = ["completed"] * 3 + ["engine_error", "completed", "engine_error"]
    assert list(found.non_tensor_batch["termination"]) == ends
    assert found.batch["response_mask"].any(-1).tolist() == [True] * 3 + [False] * 3
    assert extract_reward(found)[0].shape == found.batch["responses"].shape
    whole = RolloutSample(full_batch=found, sample_id="1", epoch=0, rollout_status={})
    assembled = assemble_batch_from_rollout_samples([whole], tokenizer(), worker.config)
    assert assembled.meta_info["trajectory_param_versions"].tolist() == [7] * 6
    index = np.array([0] * 6)
    mask = found.batch["response_mask"].float()
    advantages, _ = compute_grpo_outcome_advantage(found.batch["rm_scores"].clone(), mask, index)
    rewards = torch.tensor(scores)
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # as the page says, all six are in the baseline
    assert torch.allclose(advantages, expected[:, None] * mask)


@cache
def queue() -> Any:
    """Return verl's TransferQueue, which runs in Ray's processes between its workers and its trainer."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)  # its actors reserve three
    transfer_queue.init()
    return transfer_queue


@dataclass
class Rows:
    """What the worker put into the queue: its tags by key, and each row's fields, as the trainer gets them."""

    tags: dict[str, Any]
    rows: dict[str, Any]
    batch: Any


def rolled_out(agent: str, answers: Any = None, **more: Any) -> tuple[Any, Rows]:
    """Return the module of the v1 trainer's advantages, and two rollouts of its worker, for step 7.

    `answers` wraps the method by which verl's client answers; `more` are fields of verl's configuration.
    """
    tq = queue()
    v1 = verl.__version__.startswith("0.9")
    trainer = import_module("verl.trainer.ppo.v1.utils" if v1 else "verl.trainer.main_ppo_sync")
    workers = import_module("verl.trainer.ppo.v1.agent_loop_tq") if v1 else trainer
    multiplying.ledgers.clear()
    worker, servers = worker_of(agent, of=workers.AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.background_tasks = set()
    if answers is not None:
        servers.generate = answers(servers.generate)  # type: ignore[method-assign]
    worker.config.actor_rollout_ref.rollout.n = 2
    worker.config = OmegaConf.merge(worker.config, more)
    prompt = {"raw_prompt": [[{"role": "user", "content": QUESTION}]], "index": [0], "uid": ["u"]}
    batch = get_tensordict(prompt, {"global_steps": 7})

    async def run() -> None:
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)

    asyncio.run(run())
    tags = tq.kv_list("train")["train"]
    keys = sorted(key for key in tags if key != "u")
    found = tq.kv_batch_get(keys=keys, partition_id="train") if keys else None
    tq.kv_clear(keys=list(tags), partition_id="train")
    rows = {key: {name: found[name][number] for name in found.keys()} for number, key in enumerate(keys)}  # noqa: SIM118
    return trainer, Rows(tags, rows, found)


def the_v1_trainer_takes_every_path_with_its_own_rewards() -> None:
    """Its worker copies the last score to all outputs, and its GRPO the last advantage; other estimators read rows."""
    trainer, queue = rolled_out("make_credited_agent")
    assert sorted(queue.rows) == ["u_0_0", "u_0_1", "u_1_0", "u_1_1"]
    for session in "01":
        first, last = (queue.rows[f"u_{session}_{number}"] for number in (0, 1))
        (ledger,) = [each for each in multiplying.ledgers if each.uuid == last["extra_fields"]["rollout_id"]]
        for row, sample in zip((first, last), samples_of(ledger), strict=True):
            assert row["prompts"].tolist() + row["responses"].tolist() == sample.token_ids.tolist()
            assert sample.credit is not None
            expected = sample.credit[sample.prompt_length :].copy()
            expected[-1] += sample.reward or 0.0
            assert row["rm_scores"].tolist() == expected.tolist()
            assert row["rm_scores"].sum() == sample.total == (sample.reward or 0.0) + (0.25 if row is first else 0.5)
        assert first["response_mask"].sum() + last["response_mask"].sum() == len(SAMPLED)
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in queue.rows.values()], batch_first=True)
        for name in ("rm_scores", "response_mask")
    }
    scores, keys = padded["rm_scores"], list(queue.rows)
    totals = dict(zip(keys, scores.sum(1).tolist(), strict=True))
    assert abs(totals["u_0_1"] - totals["u_1_1"]) == 1.0, "the rollouts' own rewards are 0 and 1"

    def returns(estimator: AdvantageEstimator, scores: torch.Tensor) -> list[float]:
        data = DataProto.from_dict(
            tensors={"token_level_rewards": scores.clone(), "response_mask": padded["response_mask"]},
            non_tensors={"uid": np.array(["u"] * 4, dtype=object)},
        )
        options: dict[str, Any] = {"adv_estimator": estimator, "norm_adv_by_std_in_grpo": False}
        options["config"] = OmegaConf.create({"gamma": 1.0})
        found = trainer.compute_advantage_for_multi_trajectories(data, keys, **options)
        return [row[0].item() for row in found.batch["returns"]]

    mean = (totals["u_0_1"] + totals["u_1_1"]) / 2
    grpo = returns(AdvantageEstimator.GRPO, scores)
    assert grpo == [totals[f"{key[:3]}_1"] - mean for key in keys]
    other = scores.clone()
    other[::2] = -7.0  # the first rows
    other[1::2] = scores[1::2].flip(1)  # and the places in the last ones
    assert returns(AdvantageEstimator.GRPO, other) == grpo, "what the page says that GRPO reads"
    assert returns(AdvantageEstimator.REINFORCE_PLUS_PLUS, scores) == [totals[key] for key in keys]


class Judged(Agent):
    """A solver, and a judge with the opposite reward of its own, which has a path of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__(model=model, name="solver", tools=[multiplying.multiply], callback_handler=None)
        self.judge = Agent(model=model, name="judge", callback_handler=None)

    async def invoke_async(self, *args: Any, **more: Any) -> Any:
        result = await super().invoke_async(*args, **more)
        await self.judge.invoke_async(f"{QUESTION} 425?")
        ledger = self.model.ledger  # type: ignore[attr-defined]
        ledger.annotate("reward", 1.0, turn=ledger.last_turn("solver"))
        ledger.annotate("reward", -1.0, turn=ledger.last_turn("judge"))
        return result


def make_judged_agent(model: Any, row: Any) -> Agent:
    return Judged(model)


def rewards_of_another_agent_are_refused_where_grpo_would_ignore_them() -> None:
    """The whole group fails, and nothing is trained; each estimator that reads rows gets them."""
    for estimator, rewards in (("grpo", None), ("reinforce_plus_plus", [-1.0, 1.0])):
        _, queue = rolled_out("make_judged_agent", algorithm={"adv_estimator": estimator})
        if rewards is None:
            assert (queue.rows, queue.tags["u"]) == ({}, {"status": "failure"})
        else:
            assert [row["rm_scores"].sum() for row in queue.rows.values()] == rewards * 2


def logprobs_are_read_where_a_rollout_correction_is_set() -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    for options, is_read in (({}, False), ({"rollout_is": "token"}, True)):
        columns = {"old_log_probs": torch.zeros(1, 2), "response_mask": torch.ones(1, 2)}
        data = DataProto.from_dict(tensors={**columns, "rollout_log_probs": torch.full((1, 2), -1.0)})
        found, _ = compute_rollout_correction_and_add_to_batch(data, OmegaConf.create(options))
        assert ("rollout_is_weights" in found.batch) is is_read


def make_agent_with_one_reward(model: Any, row: Any) -> Agent:
    """Return an agent with two paths, of which the last alone has a reward."""
    agent = multiplying.editing(Agent(model=model, tools=[multiplying.multiply], callback_handler=None))

    def score(event: AfterInvocationEvent) -> None:
        model.ledger.annotate("reward", 1.0, turn=model.ledger.last_turn())

    agent.hooks.add_callback(AfterInvocationEvent, score)
    return agent


def a_path_without_a_reward_counts_as_0_in_the_v1_trainer() -> None:
    _, queue = rolled_out("make_agent_with_one_reward")
    assert sorted(queue.rows) == ["u_0_0", "u_0_1", "u_1_0", "u_1_1"]
    for key, row in queue.rows.items():
        last = key.endswith("1")
        assert (row["rm_scores"].sum(), row["rm_scores"][-1]) == ((1.0, 1.0) if last else (0.0, 0.0))
        assert row["response_mask"].any() == last


def every_row_of_the_v1_trainer_has_the_bounds_of_its_weights() -> None:
    """Its metrics make an array of whole numbers of them; its client reports two where an update was in mid-answer."""
    cases: list[tuple[list[tuple[int, int]], tuple[int, int]]] = [
        ([(7, 7), (7, 7)], (7, 7)),
        ([(7, 7), (7, 8)], (7, 8)),
        ([(7, 8)], (7, 8)),  # and the second answer is an error, which leaves nothing to train
        ([], (6, 6)),
    ]
    for steps, expected in cases:

        def answers(good: Any, steps: list[tuple[int, int]] = steps) -> Any:
            async def generate(*args: Any, **more: Any) -> TokenOutput:
                number = int("425" in tokenizer().decode(more["prompt_ids"]))
                if number >= len(steps):
                    raise RuntimeError("engine core died")
                answer: TokenOutput = await good(*args, **more)
                low, high = steps[number]
                answer.extra_fields = {"global_steps": high, "min_global_steps": low, "max_global_steps": high}
                return answer

            return generate

        _, queue = rolled_out("make_agent", answers)
        for key, row in queue.rows.items():
            assert (row["extra_fields"]["min_global_steps"], row["extra_fields"]["max_global_steps"]) == expected
            assert queue.tags[key].get("max_global_steps", expected[1]) == expected[1]  # 0.8 has no such tags


class RewardWorker:
    """Stands in for verl's reward worker: its answer has a field besides the score, as verl's own managers give."""

    def __init__(self) -> None:
        self.compute_score = self
        self.scored = 0

    async def remote(self, data: DataProto) -> dict[str, Any]:
        self.scored += len(data)
        return {"reward_score": 0.25, "reward_extra_info": {"acc": 0.25}}


def verls_own_reward_scores_whole_batches() -> None:
    """Its answers have further fields, which verl expects in all rows of a batch."""
    for reward in (None, "verl"):
        worker, servers = worker_of("make_group_agent", branches="last", reward=reward)
        worker.config["reward"] = {"custom_reward_function": {"path": "reward.py"}}
        worker.reward_loop_worker_handles = [RewardWorker()]
        good = servers.generate

        async def generate(*args: Any, good: Any = good, **more: Any) -> Any:
            text = tokenizer().decode(more["prompt_ids"])
            if "NOTHING" in text or ("BROKEN" in text and "425" in text):
                raise RuntimeError("engine core died")
            return await good(*args, **more)

        servers.generate = generate  # type: ignore[method-assign]
        for prompts in (["NONE", "NOTHING", "NONE BROKEN"], ["NONE BROKEN", "NOTHING", "NONE"]):
            found = batch_of(worker, 3, prompts=prompts)
            assert found.batch["rm_scores"].sum(-1).tolist() == [0.25] * 3
            assert found.batch["response_mask"].any(-1).tolist() == [kind == "NONE" for kind in prompts]
            assert list(found.non_tensor_batch["acc"]) == [0.25] * 3
    worker, _ = worker_of("make_group_agent", branches="last")
    worker.config["reward"] = {"custom_reward_function": {"path": "reward.py"}}
    with pytest.raises(ValueError, match=r"recorded the reward 1\.0.*reward: recorded or reward: verl"):
        batch_of(worker, 1, prompts=["1.0"])
    worker, _ = worker_of("make_group_agent", branches="last", reward="verl")
    assert "rm_scores" not in batch_of(worker, 2, prompts=["1.0", "NONE"]).batch


def the_templates_arguments_are_verls() -> None:
    worker, _ = worker_of("make_agent")
    worker.config.data.apply_chat_template_kwargs = {"chosen": "by verl"}
    multiplying.ledgers.clear()
    batch_of(worker, 1)
    assert "('chosen', 'by verl')" in str(multiplying.ledgers[0].header.certificate)


def listed(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}


@settings(max_examples=60, deadline=None, database=None)
@given(rollouts())
def outputs_are_verls(ledger: Ledger) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "end_id": 2, "logprobs": "as-recorded", "messages": 4}
    total, samples, outputs = 0, samples_of(ledger), outputs_of(ledger, **options)
    assert sorted(output.extra_fields["trajectory"] for output in outputs) == list(range(len(samples)))
    last = samples[outputs[-1].extra_fields["trajectory"]]
    assert last.loss_mask.any() == any(sample.loss_mask.any() for sample in samples), "GRPO reads the last one's mask"
    for output in outputs:
        assert isinstance(output, AgentLoopOutput)
        sample, fields = samples[output.extra_fields["trajectory"]], output.as_dict()
        assert output.reward_score == (0.0 if sample.ended_outside else sample.total)
        if sample.total is not None:
            rewards = fields["rm_scores"].double()
            rewards[-1] -= 0.0 if sample.ended_outside else (sample.reward or 0.0)
            credit = None if sample.ended_outside else sample.credit
            found = np.zeros(sample.response_length) if credit is None else credit[sample.prompt_length :]
            assert rewards.tolist() == found.tolist()
        assert torch.cat([fields["prompts"], fields["responses"]]).tolist() == sample.token_ids.tolist()
        sizes = {len(fields[name]) for name in ("responses", "response_mask", "rollout_log_probs")}
        assert sizes == {sample.response_length}
        if "routed_experts" in fields:
            assert sample.routed_experts is not None
            rows = fields["routed_experts"][: len(sample) - 1]
            assert rows.tolist() == sample.routed_experts[:-1].tolist()
        total += int(fields["response_mask"].sum())
        again = pickle.loads(pickle.dumps(output))
        assert isinstance(again, AgentLoopOutput)
        assert listed(again.as_dict()) == listed(fields)
    outside = samples_of(ledger)[0].ended_outside
    free = sum(len(turn.draft.output_ids) for turn in ledger if not turn.draft.constrained)
    assert total == (0 if outside else free)
    assert output_of(Ledger(), **options).response_mask == [0]
    assert [output.response_mask for output in outputs_of(Ledger(), **options)] == [[0]]


@dataclass
class Processor:
    """A processor as verl calls it; it remembers the text and the pictures."""

    tokens: list[int]
    image_token_id: int = PAD
    image_processor: Any = None
    merge_size: int = 2

    def __post_init__(self) -> None:
        self.image_processor = self
        self.calls: list[dict[str, Any]] = []

    def __call__(self, images: list[Any], return_tensors: str, **inputs: Any) -> BatchFeature:
        self.calls.append({"images": images, **inputs})
        grid = torch.tensor([[1, 2, 2 * count] for count in self.tokens])
        pixels = torch.zeros(int(grid.prod(dim=1).sum()), 3)
        ids = torch.zeros(1, 1)
        return BatchFeature(
            {"pixel_values": pixels, "image_grid_thw": grid, "input_ids": ids, "attention_mask": ids},
            tensor_type=return_tensors,
        )


def verls_worker_makes_the_tensors_of_images() -> None:
    ledger, processor = two_images(), Processor([4, 2])
    output = output_of(ledger, temperature=1.0, end_id=2, logprobs="as-recorded", processor=processor)
    assert isinstance(output, AgentLoopOutput)
    processor.calls.clear()
    worker, _ = worker_of("make_agent")
    worker.processor = processor
    ids = torch.tensor([output.prompt_ids + output.response_ids])
    found = worker._compute_multi_modal_inputs(output, ids)
    assert found["image_grid_thw"].tolist() == [[1, 2, 8], [1, 2, 4]]
    (call,) = processor.calls
    assert [picture.size for picture in call["images"]] == [(64, 64)] * 2
    assert int((ids == PAD).sum()) == int(found["image_grid_thw"].prod(dim=1).sum()) // 4
    with pytest.raises(ImageGridError):
        output_of(ledger, temperature=1.0, end_id=2, logprobs="as-recorded", processor=Processor([4, 3]))


if __name__ == "__main__":
    verls_worker_makes_the_tensors_of_images()
    outputs_are_verls()
    verls_worker_runs_our_loop()
    what_ends_early_or_is_too_long_keeps_its_shape()
    what_verl_cannot_take_is_refused()
    a_validation_is_sampled_as_it_likes()
    a_whole_group_keeps_its_rewards()
    the_v1_trainer_takes_every_path_with_its_own_rewards()
    rewards_of_another_agent_are_refused_where_grpo_would_ignore_them()
    logprobs_are_read_where_a_rollout_correction_is_set()
    a_path_without_a_reward_counts_as_0_in_the_v1_trainer()
    every_row_of_the_v1_trainer_has_the_bounds_of_its_weights()
    verls_own_reward_scores_whole_batches()
    the_templates_arguments_are_verls()
    print(f"verl: ok, {verl.__version__}")
