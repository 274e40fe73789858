"""CI test, without a GPU: verl's own code takes this recipe's options, data and loop, on both engines.

Hydra composes verl's configuration with the options of run.sh, verl's dataset reads what prepare_data.py wrote, its
`AgentLoopWorker` runs the agent of agent_loop.yaml through its `LLMServerClient`, and its GRPO makes advantages. Only
the engine's actor is a stand-in: a scripted policy.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.utils import create_rl_dataset, need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from prepare_data import prepare
from tito_engines import models

HERE = Path(__file__).parent
SIZES = ("data.max_prompt_length=512", "data.max_response_length=256", "actor_rollout_ref.rollout.n=3")
EXPRESSIONS = ("{n} * 17", "{n} * 18", "")
"""What the scripted policy computes at first, in turn: the right product, a wrong one, none."""
NAMES = {
    *("logprobs", "max_tokens", "temperature", "top_k", "top_p", "min_p", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Sampling parameters that verl's servers of both engines take."""


class Client(LLMServerClient):  # type: ignore[misc]  # verl has no types
    """verl's client; a scripted policy stands in for the actor that it would call."""

    def __init__(self, config: DictConfig, tokenizer: Any) -> None:
        super().__init__(config)
        self.tokens, self.turns = tokenizer, count()
        self.said: list[list[int]] = []

    async def _acquire_server(self, *_: Any, **__: Any) -> tuple[str, Any]:
        return "scripted", SimpleNamespace(generate=SimpleNamespace(remote=self.answer))

    def _release_server(self, *_: Any, **__: Any) -> None: ...

    async def answer(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        """Call the tool, then end with what it returned."""
        assert set(sampling_params) == NAMES
        text = self.tokens.decode(prompt_ids)
        asked = re.findall(r"What is (\d+) \* 17", text)[-1]
        computed = re.findall(r"\b\d{3}\b", text.partition(f"What is {asked} * 17")[2])
        expression = "" if computed else EXPRESSIONS[next(self.turns) % 3].format(n=asked)
        call = f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
        words = call if expression else f"#### {computed[-1] if computed else 1}"
        ids = self.tokens.encode(f"{words}<|im_end|>", add_special_tokens=False)
        self.said.append(ids)
        logprobs = [-0.125 * (1 + place % 7) for place in range(len(ids))]
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": 3})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer and a configuration: all of a model that a worker reads."""
    folder = tmp_path_factory.mktemp("model")
    models.load_tokenizer("smollm2").save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', "utf-8")
    return folder


def config_of(engine: str, model: Path, out: Path) -> DictConfig:
    """Return verl's configuration with the options of run.sh; Hydra refuses one that verl does not have."""
    given = {**os.environ, "ENGINE": engine, "MODEL": str(model), "OUT": str(out)}
    printed = subprocess.run([HERE / "run.sh", "--options"], env=given, capture_output=True, text=True, check=True)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", printed.stdout.splitlines())
        validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
        return compose("ppo_trainer", [*printed.stdout.splitlines(), *SIZES])


@pytest.mark.parametrize("agent", ["gsm8k_agent", "gsm8k_harness"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_verls_worker_runs_the_agent_and_its_batch_is_what_was_sampled(
    engine: str, agent: str, model: Path, tmp_path: Path
) -> None:
    """Also where a harness of another SDK is in the agent's place, through the gateway."""
    prepare(tmp_path / "data", tiny=True)
    config = config_of(engine, model, tmp_path)
    loop = (HERE / "agent_loop.yaml").read_text("utf-8").replace("gsm8k_agent", agent)
    (tmp_path / "agent_loop.yaml").write_text(loop, "utf-8")
    config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(tmp_path / "agent_loop.yaml")
    client = Client(config, models.load_tokenizer("smollm2"))
    worker = AgentLoopWorker(config, client)
    dataset = create_rl_dataset(config.data.train_files, config.data, worker.tokenizer, None)
    rows = DataProto.from_single_dict(collate_fn([dataset[at] for at in range(len(dataset))]))
    rows = rows.repeat(config.actor_rollout_ref.rollout.n, interleave=True)
    batch = asyncio.run(worker.generate_sequences(rows))

    mask = batch.batch["response_mask"].bool()
    trained = [ids[kept].tolist() for ids, kept in zip(batch.batch["responses"], mask, strict=True)]
    assert sorted(token for row in trained for token in row) == sorted(token for ids in client.said for token in ids)
    assert (batch.batch["rollout_log_probs"][mask] < 0).all()
    assert not batch.batch["rollout_log_probs"][~mask].any()
    scores = extract_reward(batch)[0]
    groups = np.repeat(np.arange(len(dataset)), 3)
    advantages, _ = compute_grpo_outcome_advantage(scores, mask.float(), groups)
    assert scores.sum(-1).tolist().count(1.0) == len(dataset)
    assert torch.equal((advantages > 0).any(-1), scores.sum(-1) == 1)
    assert (batch.non_tensor_batch["termination"] == "completed").all()


if __name__ == "__main__":
    alone = ["-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider", "-W", "ignore"]
    if code := pytest.main(["-q", *alone, __file__]):
        sys.exit(code)
    print("verl_agent_loop: ok, both engines' names")
