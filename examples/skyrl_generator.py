"""A SkyRL generator that runs an agent for each prompt, on the servers that SkyRL starts.

Return it from `get_generator(self, cfg, tokenizer, inference_engine_client)` of a subclass of SkyRL's `BasePPOExp`, as
`StrandsGenerator(inference_engine_client, cfg.trainer.policy.model.path)`. For step-wise training
(`generator.step_wise_trajectories`) change `branches` to "steps".
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from strands import Agent

from strands_tito import Ledger, Policy, SamplingParams
from strands_tito.export.skyrl import generator_output_of
from strands_tito.integrations.run_rollout import Chat, run_rollout

LIMIT = 64
"""Rollouts at once."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class StrandsGenerator:
    """Scores each rollout by the `answer` of its dataset row.

    Args:
        client: SkyRL's inference engine client.
        tokenizer: Name or folder of the model's tokenizer.
    """

    def __init__(self, client: Any, tokenizer: str) -> None:
        self.client, self.tokenizer, self.slots = client, tokenizer, asyncio.Semaphore(LIMIT)
        self.policy: Policy | None = None

    async def generate(self, input_batch: Mapping[str, Any]) -> Any:
        """Return SkyRL's `GeneratorOutput` for its `GeneratorInput`."""
        if self.policy is None:  # not earlier: SkyRL's servers may be asleep
            url = self.client.get_endpoint_url()
            self.policy = await Policy.connect_async(backend="vllm", base_url=url, tokenizer=self.tokenizer)
        given = input_batch["sampling_params"]
        sampling = SamplingParams(max_new_tokens=given["max_tokens"], **{name: given[name] for name in SAMPLING})
        rows = zip(input_batch["prompts"], input_batch["env_extras"], strict=True)
        ledgers = await asyncio.gather(*(self.rollout(self.policy, *row, sampling) for row in rows))
        is_training = input_batch["batch_metadata"].training_phase == "train"
        return generator_output_of(
            ledgers,
            temperature=given["temperature"],
            end_id=int(self.policy.tokenizer.eos_token_id),
            trajectory_ids=input_batch["trajectory_ids"],
            branches="last",
            logprobs="checked" if is_training else "omit",
        )

    async def rollout(self, policy: Policy, prompt: Chat, row: Mapping[str, Any], sampling: SamplingParams) -> Ledger:
        """Run one rollout, and annotate its reward."""
        async with self.slots:
            model = policy.model(sampling=sampling)
            agent = Agent(model=model, callback_handler=None)
            result = await run_rollout(agent, model, prompt)
            result.ledger.annotate("reward", float(row["answer"] in str(agent.messages[-1])))
            return result.ledger
