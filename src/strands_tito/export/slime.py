"""slime's `Sample`, from a rollout, and a `generate` for `--custom-generate-function-path`.

slime is no package of the registries (the one of that name is another project): it runs where its source is. Nothing
here imports it: samples are filled in place or made by the type of the one that slime gives. Fields and their meaning
are those of `slime/utils/types.py` at commit 624b824a.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from strands_tito.export.logprobs import LogprobPolicy, logprobs_for
from strands_tito.export.sample import TrainingSample, experts_of, sample_of, samples_of
from tito_core.ledger.ledger import Ledger
from tito_core.termination import Termination

STATUS = MappingProxyType(
    {
        Termination.COMPLETED: "COMPLETED",
        Termination.TRUNCATED: "TRUNCATED",
        Termination.CONTEXT: "TRUNCATED",
        Termination.LIMIT: "TRUNCATED",
        Termination.TOOL_ERROR: "FAILED",
        Termination.ENGINE_ERROR: "FAILED",
        Termination.ABORTED: "ABORTED",
        Termination.CANCELLED: "ABORTED",
    }
)
"""slime's status, by name, for each termination. What ended from outside is not trained: `remove_sample`."""

Decode = Callable[[Sequence[int]], str]
Branches = Literal["list", "last", "error"]


class SlimeSample(Protocol):
    """What is used of slime's `Sample`."""

    index: int | None
    rollout_id: int | None
    metadata: dict[str, Any]
    status: Any
    Status: ClassVar[Any]


S = TypeVar("S", bound=SlimeSample)


def fields_of(
    sample: TrainingSample,
    *,
    decode: Decode,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
) -> dict[str, Any]:
    """Return the fields that slime's `Sample` takes of a rollout, all but `status`.

    Args:
        sample: One trajectory.
        decode: Gives the text of ids, special tokens included.
        temperature: slime's `--rollout-temperature`, which it divides its logits by.
        logprobs: See `LogprobPolicy`; "omit" leaves `rollout_log_probs` None.

    Returns:
        `tokens`, all of them; `response_length`; `loss_mask` and `rollout_log_probs`, of the response only, 0 and 0.0
        on what is not trained; `weight_versions` of the trained tokens, unknown ones left out;
        `rollout_routed_experts`, (tokens - 1, layers, experts), or None; and more.

    Raises:
        LogprobMismatchError: The logprobs are another quantity than slime's.
        ValueError: The engine gave experts for some tokens only.
    """
    given = logprobs_for(sample, temperature=temperature, trainer="slime", policy=logprobs)
    experts = experts_of(sample)
    response = slice(sample.prompt_length, None)
    return {
        "tokens": sample.token_ids.tolist(),
        "response": decode(sample.response_ids.tolist()),
        "response_length": sample.response_length,
        "loss_mask": sample.response_mask.tolist(),
        "rollout_log_probs": None if given is None else given[response].tolist(),
        "rollout_routed_experts": None if experts is None else experts.tolist(),
        "weight_versions": [version for version in sample.trained_versions if version is not None],
        "reward": sample.reward,
        "remove_sample": sample.ended_outside,
    }


def fill(sample: S, rollout: Ledger, *, branches: Literal["last", "error"] = "error", **options: Any) -> S:
    """Write a rollout of one trajectory into slime's sample, in place.

    Args:
        sample: slime's own.
        rollout: The rollout; one without a turn leaves the sample `ABORTED`, and without tokens.
        branches: See `sample_of`.
        **options: `decode`, `temperature` and `logprobs`, as `fields_of` takes them, and `train_constrained`.

    Raises:
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `fields_of`.
    """
    if not len(rollout):
        return _with_status(sample, "ABORTED")
    constrained = options.pop("train_constrained", False)
    return _filled(sample, sample_of(rollout, branches=branches, train_constrained=constrained), options)


def fan_out(sample: S, rollout: Ledger, **options: Any) -> list[S]:
    """Return a sample for each trajectory of a rollout: copies of slime's own, with one `rollout_id`.

    slime's loss then counts the rollout once. Each sampled token is trained by one of them.

    Args:
        sample: slime's own; it is not changed.
        rollout: The rollout; without a turn, one sample that is `ABORTED`.
        **options: As `fill`.

    Raises:
        LogprobMismatchError, ValueError: As `samples_of` and `fields_of`.
    """
    constrained = options.pop("train_constrained", False)
    found = samples_of(rollout, train_constrained=constrained)
    copies = [_filled(copy.deepcopy(sample), each, options) for each in found]
    copies = copies or [_with_status(copy.deepcopy(sample), "ABORTED")]
    for one in copies:
        one.rollout_id = one.index if one.rollout_id is None else one.rollout_id
    return copies


def completed(
    sample: Any,
    *,
    logprobs: LogprobPolicy = "checked",
    reward_key: str | None = None,
    experts: tuple[int, int] | None = None,
) -> Any:
    """Return an aborted sample, in place, what slime's trainer needs of each; others are left as they are.

    slime asks no reward of an aborted one, and one None among rewards, or a response without tokens, ends its training.
    As in slime's own agent example the reward is 0, and a missing response one token that is not trained.

    Args:
        sample: slime's own.
        logprobs: As `fields_of`.
        reward_key: slime's `--reward-key`, under which each reward then is.
        experts: Layers and experts a token, where slime replays them: it takes none for a batch with one None.
    """
    if sample.status is not type(sample).Status.ABORTED:
        return sample
    if not sample.tokens:
        sample.tokens, sample.response, sample.response_length, sample.loss_mask = [0, 0], "", 1, [0]
        sample.rollout_log_probs = None if logprobs == "omit" else [0.0]
        if experts is not None:
            layers, chosen = experts
            sample.rollout_routed_experts = [[list(range(chosen))] * layers]
    if sample.reward is None:
        sample.reward = {reward_key: 0.0} if reward_key else 0.0
    sample.remove_sample = True
    return sample


def begun_again(sample: Any) -> None:
    """Take the reward that `completed` gave from a sample that slime runs again, as its fully-async rollouts do."""
    if sample.status is type(sample).Status.ABORTED:
        sample.reward = None


def _filled(sample: S, found: TrainingSample, options: dict[str, Any]) -> S:
    fields = fields_of(found, **options)
    if fields["reward"] is None:
        del fields["reward"]  # slime asks its reward model
    for name, value in fields.items():
        setattr(sample, name, value)
    identity = found.identity
    sample.metadata = {
        **(sample.metadata or {}),
        "tito": {
            "rollout": identity.rollout_id,
            "trajectory": identity.trajectory,
            "termination": found.termination.value,
            "logprobs": [str(semantics) for semantics in found.semantics],
        },
    }
    return _with_status(sample, STATUS[found.termination])


def _with_status(sample: S, name: str) -> S:
    sample.status = type(sample).Status[name]
    return sample
