"""`TrainingSample`: one trajectory as a prompt and a response with index-aligned columns, input of every exporter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from strands_tito.export.kept import KeptSets, kept_sets_of
from strands_tito.inspect.score import Scores, scores_of
from tito_core.backend.images import media_ids_of
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import TITOError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance, Provenances
from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import REWARD, Finish, Image, Semantics, Turn, VersionSpan, as_reward
from tito_core.termination import Termination, recorded_termination, termination_of

OUTSIDE = (Termination.TEMPLATE, Termination.ENGINE_ERROR, Termination.ABORTED, Termination.CANCELLED)
"""Terminations from outside: such a rollout's reward does not measure the policy."""

Credit = npt.NDArray[np.float64]
DESCRIBED = ("group_id", "task_id", "sample", "agent", "trajectory", "turn")
"""Fields of `Identity` that exporters write where a trainer has room for more columns."""
GroupBy = Literal["task", "agent", "turn"]
"""With what a reward is compared: its group; the same agent in it; or of those the samples with the same `turn`."""
NO_EXPERT = -1
"""Value in `routed_experts` of tokens for which the engine reported none."""


class BranchedRolloutError(TITOError, ValueError):
    """A rollout has no trajectory or several, but exactly one sample was requested."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The rollout and trajectory of a sample.

    Attributes:
        rollout_id: The ledger's uuid, shared by the samples of one rollout.
        group_id: Shared by the rollouts of one prompt, or None.
        task_id: The task, or None.
        trajectory: Index among the rollout's trajectories, from 0.
        trajectories: Number of the rollout's trajectories.
        agent: The agent of the path's last turn, as `Draft.agent` names it, or None.
        sample: Number of the rollout within its group, from 0, as `tito collect` writes it; None if there is none.
        turn: Which of its agent's turns, from 0, is the first that is the sample's own. With group and agent it groups
            samples that begin at the same turn. None in samples of older files, which are in no group by turn.
    """

    rollout_id: str
    group_id: str | None
    task_id: str | None
    trajectory: int
    trajectories: int
    agent: str | None = None
    sample: int | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampleImage:
    """An image of a sample.

    Attributes:
        offset: Column index of its first placeholder.
        length: Number of placeholders.
        image: The file as the engine read it.
    """

    offset: int
    length: int
    image: Image

    @property
    def stop(self) -> int:
        """Column index after its last placeholder."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One trajectory for a trainer. All columns have one length n and share one index.

    Attributes:
        identity: The rollout and trajectory of the sample.
        token_ids: int32, shape (n,).
        prompt_length: Number of tokens before the response, at least 1. The response starts with the first token that
            was sampled on this path and on no earlier one; tokens that an earlier sample trains are in the prompt.
        loss_mask: int64, shape (n,): 1 on the tokens that this sample trains; no other sample trains them (law 3).
        logprobs: float32, shape (n,): the engine's; NaN on every token that it did not sample.
        provenance: uint8, shape (n,): a `Provenance` for each token.
        versions: Weight versions of the sampled tokens, as spans of column indices (law 10).
        semantics: The distinct semantics of the trained tokens' logprobs, in order of appearance (law 11).
        routed_experts: Integers, shape (n, layers, experts), `NO_EXPERT` on tokens without; None if the engine
            reported none.
        termination: Why the rollout ended; equal in all its samples.
        finish: Why the last answer of this path ended.
        reward: The ledger's annotation "reward" if it is a finite number, else None.
        turns: Number of turns on the path.
        images: The images of the path, in order; their placeholders are prompt tokens.
        media_ids: Ids of the vocabulary's placeholders of images, videos and audio, where they are known.
        kept: The kept set of each token; None if nothing was truncated, and no set was recorded.
        scores: Logprobs of other models for the same ids, by the name of their column; see `Scores`.
        credit: float64, shape (n,): the rewards of turns and tool calls, each on its last sampled token, in the one
            sample whose own turn it is; 0 elsewhere. None if its turns have none.
    """

    identity: Identity
    token_ids: TokenIds
    prompt_length: int
    loss_mask: npt.NDArray[np.int64]
    logprobs: Logprobs
    provenance: Provenances
    versions: tuple[VersionSpan, ...]
    semantics: tuple[Semantics, ...]
    routed_experts: npt.NDArray[np.generic] | None
    termination: Termination
    finish: Finish
    reward: float | None
    turns: int
    images: tuple[SampleImage, ...] = ()
    media_ids: tuple[int, ...] = ()
    kept: KeptSets | None = None
    scores: Mapping[str, Scores] = field(default_factory=dict)
    credit: Credit | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt: the sampled ones and those between them."""
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
    def response_mask(self) -> npt.NDArray[np.int64]:
        """Shape (response_length,). Tokens of the prompt are never trained."""
        return self.loss_mask[self.prompt_length :]

    @property
    def ended_outside(self) -> bool:
        """Whether an engine error, an abort or a cancellation ended the rollout. Its reward then means nothing."""
        return self.termination in OUTSIDE

    @property
    def total(self) -> float | None:
        """The reward of the rollout plus the credit of this sample: what a trainer gets that takes one number a row.

        None where neither is recorded.
        """
        if self.credit is None:
            return self.reward
        return (self.reward or 0.0) + float(self.credit.sum())

    @property
    def described(self) -> dict[str, Any]:
        """The identity that a trainer has no field for, as JSON: group, task, sample, agent, path and turn."""
        return {name: getattr(self.identity, name) for name in DESCRIBED}

    @property
    def trained_versions(self) -> tuple[str | None, ...]:
        """Weight versions of the trained tokens, in order, without repeats in a row; None where unknown."""
        runs: list[str | None] = []
        for span in self.versions:
            if self.loss_mask[span.start : span.stop].any() and (not runs or runs[-1] != span.version):
                runs.append(span.version)
        return tuple(runs)


def samples_of(
    ledger: Ledger, *, agent: str | None = None, train_constrained: bool = False, max_paths: int | None = None
) -> list[TrainingSample]:
    """Return one sample for each trajectory. Over all of them each sampled token is trained once (law 3).

    A branch is a sample of its own; the turns that it shares with an earlier path are context in it. Inserted tokens
    are never trained, because the policy did not sample them and they have no logprob.

    Args:
        ledger: A rollout. Without a recorded termination, the finish reason of its last answer is used.
        agent: Return and train the paths of this agent only; None: those of all agents, which share the reward.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        max_paths: The most samples; None: all. Each holds its whole path, so that a rollout with many side branches
            has many times its tokens. The last path is kept, and those with the most sampled tokens of their own.

    Raises:
        ValueError: A trajectory has no prompt, the annotation "termination" is not a `Termination`, or `max_paths` is
            less than 1.
    """
    found, seen, ends = list[tuple[int, Trajectory]](), set[int](), _ends(ledger, agent)
    for end in _longest(ledger, ends, agent, max_paths):
        path = ledger.path(end)
        context = seen | _turns_of_others(path, agent)
        found.append((ends.index(end), _assembled(ledger, path, context, train_constrained)))
        seen.update(turn.index for turn in path)
    return [_sample(ledger, trajectory, number, len(ends)) for number, trajectory in found]


def sample_of(
    ledger: Ledger,
    *,
    branches: Literal["error", "last"] = "error",
    agent: str | None = None,
    train_constrained: bool = False,
) -> TrainingSample:
    """Return a rollout as one sample, for trainers that take one sample per rollout.

    Args:
        ledger: A rollout.
        branches: What to do with several trajectories: "error" raises; "last" takes the last path of the agent and
            trains all the agent's turns on it, so that tokens of other paths are not trained.
        agent: The agent, as `Ledger.agents` names it; None: the first one, which asked first.
        train_constrained: Whether to train tokens that were sampled under a grammar.

    Raises:
        BranchedRolloutError: There is no trajectory, or there are several and `branches` is "error".
        LookupError: The agent made no turn.
        ValueError: As `samples_of`, or `branches` is another word.
    """
    expect_one_of("branches", branches, ("error", "last"))
    ends = _ends(ledger, agent)
    if not len(ledger):
        raise BranchedRolloutError(f"Ledger {ledger.uuid} has no turns: drop it from the batch.")
    end = ledger.last_turn(agent)
    if len(ends) > 1 and branches == "error":
        first = ledger[end].draft.agent
        of = f" of agent {first!r}" if first is not None else ""
        left = left_out(ledger, exported_turns(ledger, agent=agent, last=True))
        sampled = sum(turn.draft.columns.output for turn in ledger)
        raise BranchedRolloutError(
            f"Ledger {ledger.uuid} has {len(ends)} trajectories, but this trainer takes one per rollout. Pass "
            f"branches='last' to train the last path{of} only, which leaves out {left.total():,} of {sampled:,} "
            f"sampled tokens ({by_agent(left)}), or use an exporter that returns a list. Its agents: "
            f"{', '.join(ledger.agents) or 'none named'}.\n{ledger.tree()}"
        )
    path = ledger.path(end)
    others = _turns_of_others(path, ledger[end].draft.agent)
    number = next(number for number, leaf in enumerate(ends) if path[-1] in ledger.path(leaf))
    return _sample(ledger, _assembled(ledger, path, others, train_constrained), number, len(ends))


def expect_one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Check an option: a misspelt one would be taken for another."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}.")


def has_turn(ledger: Ledger, agent: str | None) -> bool:
    """Return whether a rollout has a turn of the agent, or any if it is None; else it is exported as an empty one."""
    return len(ledger) > 0 if agent is None else agent in ledger.agents


def exported_turns(ledger: Ledger, *, agent: str | None, last: bool, max_paths: int | None = None) -> set[int]:
    """Return the turns that `sample_of` with `branches="last"` trains, or with `last` False those of `samples_of`."""
    ends = [ledger.last_turn(agent)] if last else _longest(ledger, _ends(ledger, agent), agent, max_paths)
    wanted = ledger[ends[0]].draft.agent if last else agent
    paths = [ledger.path(end) for end in ends]
    return {turn.index for path in paths for turn in path} - {
        turn for path in paths for turn in _turns_of_others(path, wanted)
    }


def left_out(ledger: Ledger, turns: Collection[int]) -> Counter[str]:
    """Return the number of sampled tokens of all turns but these, by agent."""
    found: Counter[str] = Counter()
    for turn in ledger:
        if turn.index not in turns:
            found[turn.draft.agent or "no agent"] += turn.draft.columns.output
    return found


def by_agent(tokens: Counter[str]) -> str:
    """Format the numbers that `left_out` returned, the largest first."""
    return ", ".join(f"{agent} {number:,}" for agent, number in tokens.most_common())


def group_fields(by: GroupBy) -> tuple[str, ...]:
    """Return the fields of `Identity` by which samples are grouped, besides the group.

    Raises:
        ValueError: It is another word.
    """
    fields = {"task": (), "agent": ("agent",), "turn": ("agent", "turn")}
    if by not in fields:
        raise ValueError(f"Samples are grouped by 'task', 'agent' or 'turn', not by {by!r}.")
    return fields[by]


def counted_last(samples: Iterable[TrainingSample], ledger: Ledger, agent: str | None) -> list[TrainingSample]:
    """Sort the samples of a rollout for a trainer that gives all of them the advantage of the last.

    One that trains tokens and has a reward comes last: where there are several, the last path of the agent, or of the
    first one.
    """
    main = sample_of(ledger, branches="last", agent=agent).identity.trajectory
    return sorted(
        samples, key=lambda one: (one.loss_mask.any(), one.total is not None, one.identity.trajectory == main)
    )


def trained_tokens(samples: Iterable[TrainingSample]) -> int:
    """Return the number of tokens that samples train."""
    return sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)


def sampled_mask(sample: TrainingSample) -> npt.NDArray[np.bool_]:
    """Return which tokens the engine sampled, trained or not: bool, shape (n,)."""
    return np.asarray(sample.provenance >= Provenance.SAMPLED)


def sample_number(ledger: Ledger) -> int | None:
    """Return a rollout's number within its group, from 0, as `tito collect` writes it; None if there is none."""
    number = ledger.header.user.get("sample")
    return number if type(number) is int else None


def described_of(ledger: Ledger) -> dict[str, Any]:
    """Return what `TrainingSample.described` has, for a rollout without a sample: group, task and number."""
    known = {"group_id": ledger.header.group_id, "task_id": ledger.header.task_id, "sample": sample_number(ledger)}
    return {**dict.fromkeys(DESCRIBED), **known}


def images_of(trajectory: Trajectory) -> tuple[SampleImage, ...]:
    """Return the images of a trajectory, in order.

    Raises:
        ValueError: The ledger does not hold the file of one of them.
    """
    if len(trajectory.images) != len(trajectory.media):
        raise ValueError(
            f"The trajectory has {len(trajectory.media)} images, but the ledger holds the files of "
            f"{len(trajectory.images)}. Load the rollout from the file that was written when it was sampled."
        )
    pairs = zip(trajectory.media, trajectory.images, strict=True)
    return tuple(SampleImage(span.offset, span.length, image) for span, image in pairs)


def _ends(ledger: Ledger, agent: str | None) -> list[int]:
    """Return the last turns of the paths: the leaves, or for an agent its turns that none of its turns comes after."""
    leaves = ledger.leaves()
    if agent is None:
        return leaves
    own = [[turn.index for turn in ledger.path(leaf) if turn.draft.agent == agent] for leaf in leaves]
    earlier = {turn for turns in own for turn in turns[:-1]}
    return sorted({turns[-1] for turns in own if turns} - earlier)


def _longest(ledger: Ledger, ends: list[int], agent: str | None, most: int | None) -> list[int]:
    """Return the last turns of at most so many paths, in order; see `max_paths` of `samples_of`."""
    if most is not None and most < 1:
        raise ValueError(f"max_paths is {most}, expected at least 1.")
    if most is None or len(ends) <= most:
        return ends
    whole = {end: ledger.path(end) for end in ends}
    paths = {end: {turn.index for turn in path} - _turns_of_others(path, agent) for end, path in whole.items()}
    shared = Counter(turn for path in paths.values() for turn in path)
    last = ledger.last_turn(agent)

    def worth(end: int) -> tuple[bool, int]:
        return last in paths[end], sum(ledger[turn].draft.columns.output for turn in paths[end] if shared[turn] == 1)

    return sorted(sorted(ends, key=worth, reverse=True)[:most])


def _turns_of_others(path: list[Turn], agent: str | None) -> set[int]:
    """Return the turns of a path that a known agent other than this one made; none where `agent` is None."""
    return {turn.index for turn in path if agent is not None and turn.draft.agent not in (None, agent)}


def _assembled(ledger: Ledger, path: list[Turn], context: set[int], train_constrained: bool) -> Trajectory:
    return assemble(path, context=context, train_constrained=train_constrained, images=ledger.images)


def _sample(ledger: Ledger, trajectory: Trajectory, number: int, count: int) -> TrainingSample:
    own = next(turn for turn in trajectory.path if turn.index not in trajectory.context_turns)
    prompt_length = own.path_length - own.draft.columns.output
    if not prompt_length:
        raise ValueError(
            f"Trajectory {number} of ledger {ledger.uuid} starts with a sampled token, which no trainer can score. "
            "Give every rollout a prompt."
        )
    header = ledger.header
    return TrainingSample(
        identity=Identity(
            header.uuid,
            header.group_id,
            header.task_id,
            number,
            count,
            trajectory.agent,
            sample_number(ledger),
            _number_of_turn(ledger, trajectory),
        ),
        token_ids=trajectory.token_ids,
        prompt_length=prompt_length,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        provenance=trajectory.provenance,
        versions=trajectory.versions,
        semantics=_trained_semantics(trajectory),
        routed_experts=routed_experts_of(trajectory),
        termination=recorded_termination(ledger) or termination_of(None, ledger),
        finish=trajectory.path[-1].draft.finish,
        reward=_number(ledger.annotation(REWARD)),
        turns=len(trajectory.path),
        images=images_of(trajectory),
        media_ids=media_ids_of(ledger),
        kept=kept_sets_of(trajectory),
        scores=scores_of(ledger, trajectory.path),
        credit=_credit_of(ledger, trajectory),
    )


def _number_of_turn(ledger: Ledger, trajectory: Trajectory) -> int:
    """Return how many turns the trajectory's agent made before the first that it has here and on no earlier path."""
    turns = [turn.index for turn in ledger if turn.draft.agent == trajectory.agent]
    return turns.index(min(set(turns) & set(trajectory.turns) - trajectory.context_turns))


def _credit_of(ledger: Ledger, trajectory: Trajectory) -> Credit | None:
    """Return the rewards of turns and calls as a column of a trajectory; see `TrainingSample.credit`."""
    own = {turn.index: turn for turn in trajectory.path if turn.index not in trajectory.context_turns}
    rewards = {place: reward for place, reward in credits_of(ledger).items() if place[0] in own}
    credit = np.zeros(len(trajectory), np.float64)
    for (index, call), reward in rewards.items():
        turn = own[index]
        length = turn.draft.columns.output if call is None else max(turn.draft.calls[call].stop, 1)
        credit[turn.path_length - turn.draft.columns.output + length - 1] += reward
    return credit if rewards else None


def credits_of(ledger: Ledger) -> dict[tuple[int, int | None], float]:
    """Return the rewards of turns and of tool calls, by turn and call; the call is None for a whole turn."""
    found = {(note.turn, note.call): note.value for note in ledger.annotations if note.name == REWARD}
    numbers = {place: _number(value) for place, value in found.items()}
    return {
        (turn, call): value
        for (turn, call), value in numbers.items()
        if turn is not None and value is not None and ledger[turn].draft.columns.output  # files may hold others
    }


def total_of(ledger: Ledger) -> float | None:
    """Return the reward of a rollout plus those of all its turns and calls; None without any."""
    reward, credit = _number(ledger.annotation(REWARD)), credits_of(ledger)
    return (reward or 0.0) + sum(credit.values()) if credit else reward


def _trained_semantics(trajectory: Trajectory) -> tuple[Semantics, ...]:
    found: dict[Semantics, None] = {}
    for turn in trajectory.path:
        stop = turn.path_length
        if trajectory.loss_mask[stop - turn.draft.columns.output : stop].any():
            found[turn.draft.engine.semantics] = None
    return tuple(found)


def routed_experts_of(trajectory: Trajectory) -> npt.NDArray[np.generic] | None:
    """Return the routed experts of each token, in a signed dtype that can hold `NO_EXPERT`; None without any.

    Raises:
        ValueError: The rows are flat.
    """
    if "routed_experts" not in trajectory.column_names:
        return None
    values = trajectory.column("routed_experts", fill=0)
    if values.ndim != 3:
        raise ValueError(
            f"routed_experts have shape {values.shape}, which trainers cannot read. Sample with "
            "routed_experts=(layers, experts per token) to record their shape."
        )
    reported = np.zeros(len(trajectory), np.bool_)
    for turn in trajectory.path:
        column = turn.draft.extras.get("routed_experts")
        if column is not None:
            reported[column.start : column.start + column.rows] = True
    rows = values.astype(np.result_type(values.dtype, np.int16))
    rows[~reported] = NO_EXPERT
    return rows


def _number(value: Any) -> float | None:
    try:
        return None if value is None else as_reward(value)
    except ValueError:  # a file of an earlier version may hold anything
        return None
