"""TRL: rollouts as the columns of a `rollout_func`. `strands_tito.integrations.trl` runs agents inside TRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from strands_tito.export.sample import DESCRIBED, TrainingSample, described_of, has_turn, sample_of
from strands_tito.export.trainer import LogprobPolicy, empty_response, prompt_response_of, warn_left_out
from tito_core.ledger.ledger import Ledger
from tito_core.termination import ANNOTATION


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
        rollouts: Rollouts. One without turns, or without one of the agent, becomes one untrained end token.
        temperature: The trainer's logit temperature.
        end_id: The tokenizer's end-of-sequence id.
        branches: See `sample_of`.
        agent: See `sample_of`.
        logprobs: See `LogprobPolicy`.
        train_constrained: Whether to train tokens that were sampled under a grammar.

    Returns:
        `prompt_ids`, `completion_ids`, `logprobs` (None with "omit"), `env_mask`, 1 on trained tokens; and for reward
        functions `termination`, `rollout_id`, `rollout_group`, `rollout_task`, `rollout_sample`, `rollout_agent`,
        `rollout_trajectory`, `rollout_turn`; `rollout_reward`: the reward of the rollout plus those of the row's turns
        and calls, None without any, and for a rollout that ended from outside, so that TRL (from 1.6 on) leaves it out
        of its group's baseline; and `rollout_credit`: the rewards of turns and calls alone, one entry for each token of
        the completion, or None.

    Raises:
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `prompt_response_of`.
    """
    chosen: dict[str, Any] = {"branches": branches, "agent": agent, "train_constrained": train_constrained}
    samples = [sample_of(rollout, **chosen) if has_turn(rollout, agent) else None for rollout in rollouts]
    options: dict[str, Any] = {"temperature": temperature, "end_id": end_id, "logprobs": logprobs}
    warn_left_out(rollouts, trainer="TRL", agent=agent)
    rows = [row_of(rollout, sample, **options) for rollout, sample in zip(rollouts, samples, strict=True)]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in _COLUMNS}
    return columns | ({"logprobs": None} if logprobs == "omit" else {})


def row_of(
    rollout: Ledger, sample: TrainingSample | None, *, temperature: float, end_id: int, logprobs: LogprobPolicy
) -> dict[str, Any]:
    """Return one entry of each column of `columns_of`, for a rollout and its sample, None if it has none."""
    if sample is None:
        part, termination, reward = empty_response(end_id), rollout.annotation(ANNOTATION), None
        described = described_of(rollout)
    else:
        part = prompt_response_of(sample, trainer="TRL", temperature=temperature, logprobs=logprobs)
        termination, described = sample.termination.value, sample.described
        reward = None if sample.ended_outside else sample.total
    credit = None if reward is None else part.credit
    values = (part.prompt_ids, part.response_ids, part.logprobs, part.mask, termination, rollout.uuid, reward, credit)
    return dict(zip(_COLUMNS, (*values, *described.values()), strict=True))


_COLUMNS = (
    *("prompt_ids", "completion_ids", "logprobs", "env_mask", "termination"),
    *("rollout_id", "rollout_reward", "rollout_credit"),
    *(f"rollout_{name.removesuffix('_id')}" for name in DESCRIBED),
)
