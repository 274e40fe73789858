"""SkyRL: the rollouts of one batch as a `GeneratorOutput`, which SkyRL's `GeneratorInterface` returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.optional_dependency import import_optional
from strands_tito.export.prompt_response import PromptResponse, empty_response, prompt_response_of
from strands_tito.export.sample import TrainingSample, sample_of, samples_of
from tito_core.ledger.ledger import Ledger
from tito_core.termination import Termination

if TYPE_CHECKING:
    from skyrl.train.generators.base import GeneratorOutput, TrajectoryID

STOP_REASON = MappingProxyType(
    {
        Termination.COMPLETED: "stop",
        Termination.TRUNCATED: "length",
        Termination.CONTEXT: "length",
        Termination.LIMIT: "length",
        Termination.TOOL_ERROR: "error",
        Termination.ENGINE_ERROR: "error",
        Termination.ABORTED: "abort",
        Termination.CANCELLED: "abort",
    }
)
"""SkyRL's stop reason for each termination. Its overlong filter and `zero_reward_on_non_stop` only test for "stop"."""

Branches = Literal["error", "last", "steps"]


def generator_output_of(
    rollouts: Sequence[Ledger],
    *,
    temperature: float,
    end_id: int,
    trajectory_ids: Sequence[TrajectoryID] | None = None,
    branches: Branches = "error",
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
) -> GeneratorOutput:
    """Return rollouts as a SkyRL generator does, in the order of the input batch.

    Args:
        rollouts: One rollout for each prompt of the batch, each with a reward. A rollout that ended from outside, or
            has no turns, is masked and has reward 0.
        temperature: SkyRL's logit temperature.
        end_id: The tokenizer's end-of-sequence id, the placeholder for a rollout without turns.
        trajectory_ids: The ids of the input batch; required for "steps".
        branches: "error" and "last" return one row per rollout, see `sample_of`. "steps" returns one row per
            trajectory, for SkyRL's step-wise training, which gives all rows of a rollout the advantage of its last.
        logprobs: See `LogprobPolicy`; with "omit" `rollout_logprobs` is None.
        train_constrained: Whether to train tokens that were sampled under a grammar.

    Raises:
        MissingPackageError: skyrl is not installed.
        BranchedRolloutError, LogprobMismatchError: As `sample_of` and `prompt_response_of`.
        ValueError: A rollout has no reward, only some rollouts have experts, or "steps" has no trajectory ids.
    """
    base = import_optional("skyrl.train.generators.base", "skyrl")
    if branches == "steps" and trajectory_ids is None:
        raise ValueError("branches='steps' needs trajectory_ids: pass those of SkyRL's input batch.")
    ids = list(trajectory_ids) if trajectory_ids is not None else [None] * len(rollouts)
    options: dict[str, Any] = {"trainer": "SkyRL", "temperature": temperature, "logprobs": logprobs}
    rows: list[tuple[PromptResponse, float, str, TrajectoryID | None, bool]] = []
    for rollout, name in zip(rollouts, ids, strict=True):
        found = list(_samples(rollout, branches, train_constrained))
        for number, sample in enumerate(found, 1):
            reason = STOP_REASON[sample.termination]
            rows.append((prompt_response_of(sample, **options), _reward(sample), reason, name, number == len(found)))
        if not found:
            rows.append((empty_response(end_id, logprobs=logprobs != "omit"), 0.0, "error", name, True))
    parts = [row[0] for row in rows]
    output = {
        **dict.fromkeys(base.GeneratorOutput.__annotations__),
        "prompt_token_ids": [part.prompt_ids for part in parts],
        "response_ids": [part.response_ids for part in parts],
        "rewards": [row[1] for row in rows],
        "loss_masks": [part.mask for part in parts],
        "stop_reasons": [row[2] for row in rows],
        "rollout_logprobs": None if logprobs == "omit" else [part.logprobs for part in parts],
        "trajectory_ids": None if trajectory_ids is None else [row[3] for row in rows],
        "rollout_expert_indices": _experts(parts, as_lists=not hasattr(base, "RoutedExpertIndices")),
        "is_last_step": [row[4] for row in rows] if branches == "steps" else None,
    }
    return cast("GeneratorOutput", output)


def _samples(rollout: Ledger, branches: Branches, train_constrained: bool) -> Iterator[TrainingSample]:
    if not len(rollout):
        return
    if branches == "steps":
        yield from samples_of(rollout, train_constrained=train_constrained)
    else:
        yield sample_of(rollout, branches=branches, train_constrained=train_constrained)


def _reward(sample: TrainingSample) -> float:
    if sample.ended_outside:
        return 0.0
    if sample.reward is None:
        raise ValueError(
            f"Rollout {sample.identity.rollout_id} has no reward, which SkyRL requires: "
            'call ledger.annotate("reward", number).'
        )
    return sample.reward


def _experts(parts: Sequence[PromptResponse], as_lists: bool) -> list[Any] | None:
    """Return the experts of each row, as arrays, or as lists for SkyRL 0.3. An empty rollout gets one masked row."""
    shapes = {part.experts.shape[1:] for part in parts if part.experts is not None}
    if not shapes:
        return None
    missing = [part for part in parts if part.experts is None and any(part.mask)]
    if missing or len(shapes) > 1:
        raise ValueError(
            f"SkyRL replays the experts of a whole batch or of none. Shapes (layers, experts) found: {sorted(shapes)}; "
            f"{len(missing)} of {len(parts)} rows have none. Request them in every rollout with "
            "optional_outputs={'routed_experts': True}."
        )
    empty = np.zeros((1, *shapes.pop()), np.int16)
    found = [empty if part.experts is None or not len(part.experts) else part.experts for part in parts]
    return [rows.tolist() for rows in found] if as_lists else found
