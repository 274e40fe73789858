"""Rollouts through TRL: its `GRPOTrainer` calls our `rollout_func`, pads what comes, and takes a step on it."""

from __future__ import annotations

import math
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from hypothesis import given, settings
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from strands_tito.export import BranchedRolloutError, LogprobMismatchError, sample_of
from strands_tito.integrations.trl import columns_of, recorded_reward, rollout_func
from support import multiplying
from support.multiplying import QUESTION, SAMPLED, make_agent, make_editing_agent, says
from support.rollout_forests import REWARDS, group_of_one_prompt, rollouts
from support.scripted import engine_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core import Policy
from tito_core.ledger import Ledger

caught: list[dict[str, Any]] = []


class Watched(GRPOTrainer):
    """The trainer, whose batches are looked at on their way."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        caught.append(found)
        return found


def trainer_of(function: Any, folder: str, size: int = 4, **more: Any) -> Watched:
    torch.manual_seed(0)
    loaded = tokenizer()
    loaded.pad_token = loaded.pad_token or loaded.eos_token
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(loaded), **small))
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=size,
        num_generations=size,
        max_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_completion_length=256,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    rows = [{"prompt": [{"role": "user", "content": QUESTION}]}] * size
    return Watched(
        model=model,
        reward_funcs=[recorded_reward],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=loaded,
        rollout_func=function,
    )


def a_step_is_taken_on_exactly_what_was_sampled(folder: str) -> None:
    with ScriptedServer(engine_of("vllm", says)) as server:
        policy = Policy.connect(backend="vllm", base_url=server.base_url, tokenizer=tokenizer())
        trainer = trainer_of(rollout_func(make_agent, policy), folder)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.train()
    (batch,) = caught
    assert len(multiplying.ledgers) == 4
    samples = [sample_of(ledger) for ledger in multiplying.ledgers]
    by_id = {tuple(sample.token_ids.tolist()) for sample in samples}
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    for row in range(4):
        kept = batch["completion_ids"][row][mask[row].bool()].tolist()
        assert kept == SAMPLED
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        whole = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
        assert tuple(prompt + whole) in by_id
        if "sampling_per_token_logps" in batch:
            given = batch["sampling_per_token_logps"][row][mask[row].bool()]
            expected = samples[0].logprobs[samples[0].loss_mask.astype(bool)]
            assert torch.equal(given, torch.from_numpy(expected))
    assert batch["advantages"].abs().max() > 0
    after = list(trainer.model.parameters())
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in entries)


def what_trl_cannot_take_is_refused(folder: str) -> None:
    with ScriptedServer(engine_of("vllm", says)) as server:
        policy = Policy.connect(backend="vllm", base_url=server.base_url, tokenizer=tokenizer())
        function = rollout_func(make_editing_agent, policy)
        with pytest.raises(BranchedRolloutError, match="2 trajectories"):
            trainer_of(function, folder).train()
        last = rollout_func(make_editing_agent, policy, branches="last")
        trainer_of(last, folder).train()
        with pytest.raises(LogprobMismatchError, match=r"with log_softmax\(logits / 0.5\)"):  # this server's are raw
            trainer_of(rollout_func(make_agent, policy), folder, temperature=0.5).train()
        trainer_of(rollout_func(make_agent, policy, logprobs="omit"), folder).train()


class TrainersServer:
    """Stands in for TRL's connection to the vLLM server that it updates: no weights are sent."""

    def __init__(self, *_: Any, **__: Any) -> None:
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)
        self.synced = 0

    def sync_weights(self) -> None:
        self.synced += 1


def recorded_logprobs_are_read_in_server_mode(folder: str) -> None:
    """TRL corrects its loss by the ratio of its own and the recorded logprobs, only with `use_vllm=True`."""
    grpo_trainer.VLLMGeneration = TrainersServer
    server: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_importance_sampling_mode": "token_truncate",
    }
    server["vllm_importance_sampling_cap"] = 1e9  # the model here is random: no bound may hide the shift
    losses = {}
    for mode in ({}, server):
        for shift in (0.0, -0.5):

            def columns(prompts: Any, trainer: Any, shift: float = shift) -> dict[str, Any]:
                found = columns_of(group_of_one_prompt(), temperature=1.0, end_id=2, branches="last")
                # The logprobs of a random model are near this; without a shift, the ratio is about 1.
                shifted = [[-math.log(len(tokenizer())) * kept for kept in mask] for mask in found["env_mask"]]
                shifted[0] = [value + shift for value in shifted[0]]  # of all rows, the two advantages would cancel
                return {**found, "logprobs": shifted}

            trainer = trainer_of(columns, folder, size=6, logging_steps=1, **mode)
            trainer.train()
            assert not mode or trainer.vllm_generation.synced == 1
            losses[bool(mode), shift] = trainer.state.log_history[0]["loss"]
    assert losses[False, 0.0] == losses[False, -0.5], "without use_vllm they are not read"
    assert losses[True, -0.5] < losses[True, 0.0] - 0.05, losses  # a larger ratio where the advantage is positive


def a_group_without_those_that_do_not_count() -> None:
    def columns(prompts: Any, trainer: Any) -> dict[str, Any]:
        group = group_of_one_prompt()
        group[0].annotate("reward", REWARDS[0] - 0.25)
        group[0].annotate("reward", 0.25, turn=0)
        return columns_of(group, temperature=1.0, end_id=2, branches="last", logprobs="as-recorded")

    with tempfile.TemporaryDirectory() as folder:
        trainer_of(columns, folder, size=6).train()
    found = caught[-1]["advantages"]
    rewards = torch.tensor(REWARDS)
    if Version(trl.__version__) < Version("1.6"):  # None is 0 there, and all six are in the baseline
        rewards = torch.tensor([*REWARDS, 0.0, 0.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert torch.allclose(found[: len(rewards)], expected)
    assert not found[len(rewards) :].any()


@settings(max_examples=40, deadline=None, database=None)
@given(rollouts())
def columns_are_aligned(ledger: Ledger) -> None:
    found = columns_of([ledger, Ledger()], temperature=1.0, end_id=2, branches="last", logprobs="as-recorded")
    for row in range(2):
        sizes = {len(found[name][row]) for name in ("completion_ids", "logprobs", "env_mask")}
        assert len(sizes) == 1
        assert min(sizes) >= 1
        assert len(found["prompt_ids"][row]) >= 1
    sample = sample_of(ledger, branches="last")
    assert found["prompt_ids"][0] + found["completion_ids"][0] == sample.token_ids.tolist()
    assert sum(found["env_mask"][0]) == (0 if sample.ended_outside else sample.loss_mask.sum())
    assert found["env_mask"][1] == [0]


if __name__ == "__main__":
    columns_are_aligned()
    with tempfile.TemporaryDirectory() as place:
        a_step_is_taken_on_exactly_what_was_sampled(place)
        what_trl_cannot_take_is_refused(place)
        a_group_without_those_that_do_not_count()
        recorded_logprobs_are_read_in_server_mode(place)
    print(f"trl: ok, {trl.__version__}, {len(caught)} batches")
