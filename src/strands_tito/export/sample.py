"""What every trainer is given: a prompt, and a response of sampled and other tokens, index-aligned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance, Provenances
from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import Finish, Semantics, VersionSpan
from tito_core.termination import Termination, recorded_termination, termination_of

NO_EXPERT = -1
"""Stands in `routed_experts` where the engine gave no row."""


class BranchedRolloutError(ValueError):
    """A rollout has several trajectories, and one sample was asked for."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which rollout a sample is of.

    Attributes:
        rollout_id: The ledger's uuid, shared by the samples of one rollout.
        group_id: Shared by the rollouts of one prompt, or None.
        task_id: The task, or None.
        trajectory: Its place among the rollout's trajectories, from 0.
        trajectories: How many the rollout has.
    """

    rollout_id: str
    group_id: str | None
    task_id: str | None
    trajectory: int
    trajectories: int


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One trajectory as trainers take it. All columns have one length n and share one index.

    Attributes:
        identity: Which rollout it is of.
        token_ids: int32, shape (n,).
        prompt_length: Tokens before the response, at least 1. The response begins with the first token that was
            sampled on this path and on no earlier one, so that what an earlier sample trains lies in the prompt.
        loss_mask: uint8, shape (n,): 1 where the token is trained by this sample, and by no other (law 3).
        logprobs: float32, shape (n,): the engine's; NaN on every token that it did not sample.
        provenance: uint8, shape (n,): a `Provenance` a token.
        versions: Weight versions of the sampled tokens, in offsets of the columns (law 10).
        semantics: What the logprobs of the trained tokens mean: the distinct ones, in order of appearance (law 11).
        routed_experts: The engine's, shape (n, layers, experts), `NO_EXPERT` where it gave none; None without any.
        termination: Why the rollout ended, the same in each of its samples.
        finish: Why the last answer of this path ended.
        reward: The ledger's annotation "reward", where it is a number.
        turns: Answers on the path.
    """

    identity: Identity
    token_ids: TokenIds
    prompt_length: int
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Logprobs
    provenance: Provenances
    versions: tuple[VersionSpan, ...]
    semantics: tuple[Semantics, ...]
    routed_experts: npt.NDArray[np.generic] | None
    termination: Termination
    finish: Finish
    reward: float | None
    turns: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt: sampled ones and those between them."""
        return len(self) - self.prompt_length

    @property
    def prompt_ids(self) -> TokenIds:
        """Shape (prompt_length,)."""
        return self.token_ids[: self.prompt_length]

    @property
    def response_ids(self) -> TokenIds:
        """Shape (response_length,)."""
        return self.token_ids[self.prompt_length :]

    @property
    def response_mask(self) -> npt.NDArray[np.uint8]:
        """Shape (response_length,). No token before it is trained."""
        return self.loss_mask[self.prompt_length :]

    @property
    def ended_outside(self) -> bool:
        """Whether the rollout ended by no doing of the policy or its tools, so that a reward says nothing of it."""
        return self.termination in (Termination.ENGINE_ERROR, Termination.ABORTED, Termination.CANCELLED)

    @property
    def trained_versions(self) -> tuple[str | None, ...]:
        """Versions of the trained tokens, in order, one an uninterrupted run; None where the engine did not say."""
        runs: list[str | None] = []
        for span in self.versions:
            if self.loss_mask[span.start : span.stop].any() and (not runs or runs[-1] != span.version):
                runs.append(span.version)
        return tuple(runs)


def samples_of(ledger: Ledger, *, train_constrained: bool = False) -> list[TrainingSample]:
    """Return a rollout's trajectories as samples; over all of them each sampled token is trained once (law 3).

    A path that branched off is a sample of its own, in which the turns that it shares with an earlier one are context.
    Inserted tokens are never trained: the policy did not choose them, and they have no logprob.

    Args:
        ledger: A rollout. Where nobody recorded why it ended, its last answer's finish says so.
        train_constrained: Whether tokens that were sampled under a grammar are trained.

    Raises:
        ValueError: A trajectory has no prompt, or the annotation "termination" is no `Termination`.
    """
    found = ledger.trajectories(train_constrained=train_constrained)
    return [_sample(ledger, trajectory, number, len(found)) for number, trajectory in enumerate(found)]


def sample_of(
    ledger: Ledger, *, branches: Literal["error", "last"] = "error", train_constrained: bool = False
) -> TrainingSample:
    """Return a rollout as one sample, for trainers that take one a rollout.

    Args:
        ledger: A rollout.
        branches: What becomes of a rollout with several trajectories: "error", or "last", which takes the one with
            the latest turn and trains all its turns; what was sampled on other paths only is then not trained.
        train_constrained: Whether tokens that were sampled under a grammar are trained.

    Raises:
        BranchedRolloutError: There is no trajectory, or there are several and `branches` is "error".
        ValueError: As `samples_of`.
    """
    leaves = ledger.leaves()
    if not leaves:
        raise BranchedRolloutError(f"Ledger {ledger.uuid} holds no turn, so there is nothing to train on.")
    if len(leaves) > 1 and branches == "error":
        raise BranchedRolloutError(
            f"Ledger {ledger.uuid} holds {len(leaves)} trajectories, and this trainer takes one a rollout. Take the "
            "last one by branches='last', which trains no token of the other paths, or all of them with a trainer "
            f"that takes a list.\n{ledger.tree()}"
        )
    path = ledger.path(len(ledger) - 1)
    trajectory = assemble(path, context=frozenset(), train_constrained=train_constrained)
    return _sample(ledger, trajectory, len(leaves) - 1, len(leaves))


def trained_tokens(samples: Iterable[TrainingSample]) -> int:
    """Count the tokens that samples train."""
    return sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)


def _sample(ledger: Ledger, trajectory: Trajectory, number: int, count: int) -> TrainingSample:
    own = next(turn for turn in trajectory.path if turn.index not in trajectory.context_turns)
    prompt_length = own.path_length - own.draft.columns.output
    if not prompt_length:
        raise ValueError(
            f"Trajectory {number} of ledger {ledger.uuid} begins with a sampled token, which no trainer can score: "
            "an engine is always given a prompt."
        )
    header = ledger.header
    return TrainingSample(
        identity=Identity(header.uuid, header.group_id, header.task_id, number, count),
        token_ids=trajectory.token_ids,
        prompt_length=prompt_length,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        provenance=trajectory.provenance,
        versions=trajectory.versions,
        semantics=_trained_semantics(trajectory),
        routed_experts=_experts(trajectory),
        termination=recorded_termination(ledger) or termination_of(None, ledger),
        finish=trajectory.path[-1].draft.finish,
        reward=_reward(ledger),
        turns=len(trajectory.path),
    )


def _trained_semantics(trajectory: Trajectory) -> tuple[Semantics, ...]:
    found: dict[Semantics, None] = {}
    for turn in trajectory.path:
        stop = turn.path_length
        if trajectory.loss_mask[stop - turn.draft.columns.output : stop].any():
            found[turn.draft.engine.semantics] = None
    return tuple(found)


def _experts(trajectory: Trajectory) -> npt.NDArray[np.generic] | None:
    """Return the column in a signed type, in which `NO_EXPERT` has a place.

    Raises:
        ValueError: Its rows are flat.
    """
    if "routed_experts" not in trajectory.column_names:
        return None
    found = trajectory.column("routed_experts", fill=0)
    if found.ndim != 3:
        raise ValueError(
            f"routed_experts have shape {found.shape}, which trainers cannot read. Sample with "
            "routed_experts=(layers, experts per token) to record their shape."
        )
    given = np.zeros(len(trajectory), np.bool_)
    for turn in trajectory.path:
        column = turn.draft.extras.get("routed_experts")
        if column is not None:
            given[column.start : column.start + column.rows] = True
    rows = found.astype(np.result_type(found.dtype, np.int16))
    rows[~given] = NO_EXPERT
    return rows


def _reward(ledger: Ledger) -> float | None:
    value = ledger.annotation("reward")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def sampled(sample: TrainingSample) -> npt.NDArray[np.bool_]:
    """Tell which tokens of a sample the engine sampled, trained or not, shape (n,)."""
    return np.asarray(sample.provenance >= Provenance.SAMPLED)


def experts_of(sample: TrainingSample) -> npt.NDArray[np.generic] | None:
    """Return the experts of every token but the last, which no logit of a loss needs.

    Returns:
        Integers, shape (n - 1, layers, experts), or None where the engine gave none.

    Raises:
        ValueError: Some tokens have none: a replay would send them through experts of its own choice.
    """
    if sample.routed_experts is None:
        return None
    rows = sample.routed_experts[:-1]
    missing = np.flatnonzero((rows == NO_EXPERT).any(axis=(1, 2)))
    if len(missing):
        raise ValueError(
            f"The engine gave no experts for {len(missing)} of {len(sample) - 1} tokens, the first at {missing[0]}, in "
            f"rollout {sample.identity.rollout_id}: ask for them in every turn with wanted={{'routed_experts': True}}."
        )
    return rows
