"""SkyRL's `GeneratorOutput`, from the rollouts of one of its batches: what a `GeneratorInterface` returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from strands_tito.export.flat import Flat, flat_of, nothing
from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.missing import imported
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
"""SkyRL's stop reason for each termination. Its overlong filter and `zero_reward_on_non_stop` look for "stop" only."""

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
    """Give rollouts as SkyRL's generators return them, in the order of its input batch.

    Args:
        rollouts: A rollout for each prompt of the batch, each with a reward; what ended from outside, or without a
            turn, is masked and its reward is 0.
        temperature: What SkyRL divides its logits by.
        end_id: The tokenizer's end of sequence, which stands for a rollout without a turn.
        trajectory_ids: Those of the input batch, which "steps" needs.
        branches: "error" and "last" give a row a rollout, see `sample_of`; "steps" a row a trajectory, for SkyRL's
            step-wise training, which gives all rows of a rollout the advantage of its last.
        logprobs: See `LogprobPolicy`; with "omit" there are none.
        train_constrained: Whether tokens under a grammar are trained.

    Raises:
        MissingPackageError: skyrl is not installed.
        BranchedRolloutError, LogprobMismatchError: As `sample_of` and `flat_of`.
        ValueError: A rollout has no reward, some have experts and others none, or "steps" has no trajectory ids.
    """
    base = imported("skyrl.train.generators.base", "skyrl")
    if branches == "steps" and trajectory_ids is None:
        raise ValueError("SkyRL's step-wise training goes by trajectory ids: give those of the input batch.")
    ids = list(trajectory_ids) if trajectory_ids is not None else [None] * len(rollouts)
    options: dict[str, Any] = {"trainer": "SkyRL", "temperature": temperature, "logprobs": logprobs}
    rows: list[tuple[Flat, float, str, TrajectoryID | None, bool]] = []
    for rollout, name in zip(rollouts, ids, strict=True):
        found = list(_samples(rollout, branches, train_constrained))
        for number, sample in enumerate(found, 1):
            reason = STOP_REASON[sample.termination]
            rows.append((flat_of(sample, **options), _reward(sample), reason, name, number == len(found)))
        if not found:
            rows.append((nothing(end_id, logprobs=logprobs != "omit"), 0.0, "error", name, True))
    flats = [row[0] for row in rows]
    output = {
        **dict.fromkeys(base.GeneratorOutput.__annotations__),
        "prompt_token_ids": [flat.prompt_ids for flat in flats],
        "response_ids": [flat.response_ids for flat in flats],
        "rewards": [row[1] for row in rows],
        "loss_masks": [flat.mask for flat in flats],
        "stop_reasons": [row[2] for row in rows],
        "rollout_logprobs": None if logprobs == "omit" else [flat.logprobs for flat in flats],
        "trajectory_ids": None if trajectory_ids is None else [row[3] for row in rows],
        "rollout_expert_indices": _experts(flats, as_lists=not hasattr(base, "RoutedExpertIndices")),
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
            f"Rollout {sample.identity.rollout_id} has no reward, and SkyRL's generators give one: "
            'ledger.annotate("reward", ...) with a number.'
        )
    return sample.reward


def _experts(flats: Sequence[Flat], as_lists: bool) -> list[Any] | None:
    """Return a row a token but the last, as arrays, or as the lists of SkyRL 0.3; of an empty rollout one, unread."""
    shapes = {flat.experts.shape[1:] for flat in flats if flat.experts is not None}
    if not shapes:
        return None
    missing = [flat for flat in flats if flat.experts is None and any(flat.mask)]
    if missing or len(shapes) > 1:
        raise ValueError(
            f"The engine gave experts of shapes {sorted(shapes)}, and none for {len(missing)} of {len(flats)} rows: "
            "SkyRL replays all of a batch or nothing."
        )
    empty = np.zeros((1, *shapes.pop()), np.int16)
    found = [empty if flat.experts is None or not len(flat.experts) else flat.experts for flat in flats]
    return [rows.tolist() for rows in found] if as_lists else found
