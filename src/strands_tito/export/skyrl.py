"""SkyRL: the rollouts of one batch as a `GeneratorOutput`, which SkyRL's `GeneratorInterface` returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np

from strands_tito.export.sample import (
    TrainingSample,
    counted_last,
    described_of,
    expect_one_of,
    has_turn,
    sample_of,
    samples_of,
)
from strands_tito.export.trainer import (
    LogprobPolicy,
    PromptResponse,
    check_last_row,
    empty_response,
    import_optional,
    prompt_response_of,
    warn_left_out,
    warn_without_agent,
)
from tito_core.ledger.ledger import Ledger
from tito_core.termination import Termination

if TYPE_CHECKING:
    from skyrl.train.generators.base import GeneratorOutput, TrajectoryID

logger = logging.getLogger(__name__)

STOP_REASON = MappingProxyType(
    {
        Termination.COMPLETED: "stop",
        Termination.TRUNCATED: "length",
        Termination.CONTEXT: "length",
        Termination.LIMIT: "length",
        Termination.TOOL_ERROR: "error",
        Termination.TEMPLATE: "error",
        Termination.ENGINE_ERROR: "error",
        Termination.ABORTED: "abort",
        Termination.CANCELLED: "abort",
    }
)
"""SkyRL's stop reason for each termination. Its overlong filter and `zero_reward_on_non_stop` only test for "stop"."""

Branches = Literal["error", "last", "steps"]
_KEEP = "Pass agent= or branches='last', or record one reward for the whole rollout."


def generator_output_of(
    rollouts: Sequence[Ledger],
    *,
    temperature: float,
    end_id: int,
    trajectory_ids: Sequence[TrajectoryID] | None = None,
    branches: Branches = "error",
    agent: str | None = None,
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
    replays: bool = False,
    top_k: int | None = None,
    experts: tuple[int, int] | None = None,
    token_rewards: bool | None = None,
    max_paths: int | None = None,
) -> GeneratorOutput:
    """Return rollouts as a SkyRL generator does, in the order of the input batch.

    Args:
        rollouts: One rollout for each prompt of the batch. One that ended from outside, or has no reward or no turns of
            the agent, is masked and has reward 0, which SkyRL still counts in its group's baseline.
        temperature: SkyRL's logit temperature.
        end_id: The tokenizer's end-of-sequence id, the placeholder for a rollout without turns of the agent.
        trajectory_ids: The ids of the input batch; required for "steps".
        branches: "error" and "last" return one row per rollout, see `sample_of`. "steps" returns one row per
            trajectory, for SkyRL's step-wise training, which gives all rows of a rollout the advantage of its last: see
            `counted_last`.
        agent: See `samples_of` and `sample_of`.
        logprobs: See `LogprobPolicy`; with "omit" `rollout_logprobs` is None.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        replays: SkyRL's own `trainer.algorithm.enable_sample_support_replay`. Without it SkyRL ignores kept sets, so a
            truncated rollout is refused.
        top_k: With `replays`, the width of the kept sets, the same in every call; ties make some sets larger than the
            sampler's top_k.
        experts: (layers, experts per token) if SkyRL replays experts.
        token_rewards: Whether `rewards` has one number for each token, with the rollout's on the last, or one for each
            row, `TrainingSample.total`.
        max_paths: The most rows of a rollout, for "steps"; see `samples_of`.

    SkyRL joins the outputs of several calls in its fully async training and in dynamic sampling. Without the last three
    options the form of an output is that of the call's own rollouts, so that such outputs may not fit together.

    Raises:
        MissingPackageError: skyrl is not installed.
        BranchedRolloutError, LogprobMismatchError: As `sample_of` and `prompt_response_of`.
        UnreadRewardError: With "steps": rewards of another agent than the last row's would be ignored.
        ValueError: `branches` is another word, no rollout has a reward and by their ids they are not one group, only
            some have experts, a kept set is larger than `top_k`, or "steps" has no trajectory ids.

    Without `token_rewards`, `rewards` has one number for each row, or one for each token of the response where turns or
    calls have rewards.
    `rollout_sample_support`, where SkyRL has it and `replays`, holds the kept sets.
    `env_metrics`, where SkyRL has it, names each row's rollout, group, task, sample and agent.
    """
    base = import_optional("skyrl.train.generators.base", "skyrl")
    expect_one_of("branches", branches, get_args(Branches))
    if branches == "steps" and trajectory_ids is None:
        raise ValueError("branches='steps' needs trajectory_ids: pass those of SkyRL's input batch.")
    ids = list(trajectory_ids) if trajectory_ids is not None else [None] * len(rollouts)
    fields = base.GeneratorOutput.__annotations__
    replays = replays and _SUPPORT in fields  # from 0.4 on
    options: dict[str, Any] = {"trainer": "SkyRL", "temperature": temperature, "logprobs": logprobs, "replays": replays}
    rows: list[_Row] = []
    if branches == "last" or (branches == "steps" and max_paths is not None):
        warn_left_out(rollouts, trainer="SkyRL", agent=agent, max_paths=max_paths if branches == "steps" else None)
    else:
        warn_without_agent(rollouts, trainer="SkyRL", agent=agent)
    for rollout, name in zip(rollouts, ids, strict=True):
        found = list(_samples(rollout, branches, agent, train_constrained, max_paths))
        check_last_row(found, trainer="SkyRL's step-wise training", keep=_KEEP, refuse=True)
        for number, sample in enumerate(found, 1):
            reward = 0.0 if sample.ended_outside else sample.total
            described = {"rollout_id": rollout.uuid, **sample.described}
            part, reason = prompt_response_of(sample, **options), STOP_REASON[sample.termination]
            rows.append(_Row(part, reward, reason, name, number == len(found), described, not sample.ended_outside))
        if not found:
            part = empty_response(end_id, logprobs=logprobs != "omit")
            described = {"rollout_id": rollout.uuid, **described_of(rollout)}
            rows.append(_Row(part, 0.0, "error", name, True, described, False))
    _expect_rewards(rows)
    rows = [row.without_reward() if row.lacks_reward else row for row in rows]
    parts = [row.part for row in rows]
    output = {
        **dict.fromkeys(fields),
        "prompt_token_ids": [part.prompt_ids for part in parts],
        "response_ids": [part.response_ids for part in parts],
        "rewards": _rewards(rows, token_rewards),
        "loss_masks": [part.mask for part in parts],
        "stop_reasons": [row.reason for row in rows],
        "rollout_logprobs": None if logprobs == "omit" else [part.logprobs for part in parts],
        "trajectory_ids": None if trajectory_ids is None else [row.name for row in rows],
        "rollout_expert_indices": _experts(parts, experts, as_lists=not hasattr(base, "RoutedExpertIndices")),
        "is_last_step": [row.is_last for row in rows] if branches == "steps" else None,
        **({_SUPPORT: _support(parts, top_k)} if replays else {}),
        **({"env_metrics": [row.described for row in rows]} if "env_metrics" in fields else {}),
    }
    return cast("GeneratorOutput", output)


_SUPPORT = "rollout_sample_support"


def _rewards(rows: Sequence[_Row], by_token: bool | None) -> list[float | None] | list[list[float]]:
    """Return the reward of each row, or of each of its tokens; with `by_token` None, if turns or calls have rewards.

    A number and a list that ends with it differ to SkyRL: its `zero_variance_filter` reads numbers only.
    """
    totals = [row.reward for row in rows]
    if not (any(row.part.credit is not None for row in rows) if by_token is None else by_token):
        return totals
    parts = [row.part if row.is_judged else replace(row.part, credit=None) for row in rows]
    return [part.rewards((total or 0.0) - sum(part.credit or ())) for part, total in zip(parts, totals, strict=True)]


def _support(parts: Sequence[PromptResponse], top_k: int | None) -> list[Any] | None:
    """Return the kept sets of each response, int32 of shape (tokens, `top_k`).

    Without `top_k` the width is that of the largest set, and the result is None if no turn has any.
    """
    width = max((int(part.kept.counts.max(initial=0)) for part in parts if part.kept is not None), default=0)
    if top_k is not None:
        if top_k < max(width, 1):
            raise ValueError(
                f"top_k is {top_k}, but the largest kept set has {width} tokens (ties of logits make a set larger than "
                "the sampler's top_k): pass a top_k that holds every set of the run, or leave it out."
            )
        width = top_k
    if not width:
        return None
    empty = [np.full((len(part.response_ids), width), -1, np.int32) for part in parts]
    return [none if part.kept is None else part.kept.padded(width) for part, none in zip(parts, empty, strict=True)]


class _Row(NamedTuple):
    part: PromptResponse
    reward: float | None
    reason: str
    name: TrajectoryID | None
    is_last: bool
    described: dict[str, Any]
    is_judged: bool

    @property
    def lacks_reward(self) -> bool:
        """Whether a reward is needed and missing."""
        return self.is_judged and self.reward is None

    def without_reward(self) -> _Row:
        """Return the row masked, with reward 0."""
        return self._replace(part=self.part.masked(), reward=0.0)


def _samples(
    rollout: Ledger, branches: Branches, agent: str | None, train_constrained: bool, max_paths: int | None
) -> Iterator[TrainingSample]:
    if not has_turn(rollout, agent):
        return
    if branches == "steps":
        samples = samples_of(rollout, agent=agent, train_constrained=train_constrained, max_paths=max_paths)
        yield from counted_last(samples, rollout, agent)
    else:
        yield sample_of(rollout, branches=branches, agent=agent, train_constrained=train_constrained)


def _expect_rewards(rows: Sequence[_Row]) -> None:
    """Check that some rollout has a reward where one is needed, and log those without.

    One group is not checked: SkyRL's fully async trainer asks for one a call, joins it with others that may have
    rewards, and ends the whole run on an error.

    Raises:
        ValueError: None of them has one, and they are not known to be one group.
    """
    missing = [row.described["rollout_id"] for row in rows if row.lacks_reward]
    no_reward = missing and all(row.lacks_reward for row in rows if row.is_judged)
    if no_reward and len({row.name.instance_id for row in rows if row.name is not None}) != 1:
        raise ValueError(
            f"None of the rollouts has a reward, which SkyRL requires, for example {missing[0]}: "
            'call ledger.annotate("reward", number). If these are one group of a batch, pass their trajectory_ids.'
        )
    for rollout in dict.fromkeys(missing):
        logger.warning("rollout=<%s> | not trained: without a reward, it is 0 in its group's baseline", rollout)


def _experts(parts: Sequence[PromptResponse], given: tuple[int, int] | None, as_lists: bool) -> list[Any] | None:
    """Return the experts of each row, as arrays, or as lists for SkyRL 0.3. An empty rollout gets one masked row."""
    shapes = {part.experts.shape[1:] for part in parts if part.experts is not None} | ({given} if given else set())
    if not shapes:
        return None
    missing = [part for part in parts if part.experts is None and any(part.mask)]
    if missing or len(shapes) > 1:
        raise ValueError(
            "SkyRL replays the experts of a whole batch or of none. Shapes (layers, experts) found or given: "
            f"{sorted(shapes)}; {len(missing)} of {len(parts)} rows have none. Request them in every rollout with "
            "optional_outputs={'routed_experts': True}."
        )
    empty = np.zeros((1, *shapes.pop()), np.int16)
    found = [empty if part.experts is None or not len(part.experts) else part.experts for part in parts]
    return [rows.tolist() for rows in found] if as_lists else found
