"""TRL: rollouts as the columns of a `rollout_func`. `strands_tito.integrations.trl` runs agents inside TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.prompt_response import PromptResponse, empty_response, prompt_response_of
from strands_tito.export.sample import sample_number, sample_of
from tito_core.ledger.ledger import Ledger


def columns_of(
    rollouts: Sequence[Ledger],
    *,
    temperature: float,
    end_id: int,
    branches: Literal["error", "last"] = "error",
    agent: str | None = None,
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
) -> dict[str, Any]:
    """Return rollouts as the columns that TRL takes from a `rollout_func`, one entry per rollout.

    Args:
        rollouts: Rollouts. One without turns becomes one untrained end token.
        temperature: The trainer's logit temperature.
        end_id: The tokenizer's end-of-sequence id.
        branches: See `sample_of`.
        agent: See `sample_of`.
        logprobs: See `LogprobPolicy`.
        train_constrained: Whether to train tokens that were sampled under a grammar.

    Returns:
        `prompt_ids`, `completion_ids`, `logprobs` (None with "omit"), `env_mask`, 1 on trained tokens; and for reward
        functions `termination`, `rollout_id`, `rollout_group`, `rollout_task`, `rollout_sample`, `rollout_agent`, and
        `rollout_reward`: the ledger's annotation "reward"; None without one, and for a rollout that ended from outside,
        so that TRL (from 1.6 on) leaves it out of its group's baseline.

    Raises:
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `prompt_response_of`.
    """
    parts: list[PromptResponse] = []
    terminations: list[str | None] = []
    rewards: list[float | None] = []
    agents: list[str | None] = []
    for rollout in rollouts:
        if not len(rollout):
            parts.append(empty_response(end_id))
            terminations.append(rollout.annotation("termination"))
            rewards.append(None)
            agents.append(None)
            continue
        sample = sample_of(rollout, branches=branches, agent=agent, train_constrained=train_constrained)
        parts.append(prompt_response_of(sample, trainer="TRL", temperature=temperature, logprobs=logprobs))
        terminations.append(sample.termination.value)
        rewards.append(None if sample.ended_outside else sample.reward)
        agents.append(sample.identity.agent)
    return {
        "prompt_ids": [part.prompt_ids for part in parts],
        "completion_ids": [part.response_ids for part in parts],
        "logprobs": None if logprobs == "omit" else [part.logprobs for part in parts],
        "env_mask": [part.mask for part in parts],
        "termination": terminations,
        "rollout_id": [rollout.uuid for rollout in rollouts],
        "rollout_group": [rollout.header.group_id for rollout in rollouts],
        "rollout_task": [rollout.header.task_id for rollout in rollouts],
        "rollout_sample": [sample_number(rollout) for rollout in rollouts],
        "rollout_agent": agents,
        "rollout_reward": rewards,
    }
