"""slime: a rollout as slime's `Sample`. `strands_tito.integrations.slime_generate` runs the rollouts.

slime is not on PyPI (the package of that name is another project), so nothing here imports it: functions fill the
sample that slime passes, or copies of it. Field names and meanings are those of `slime/utils/types.py` at commit
624b824a.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np

from strands_tito.export.sample import TrainingSample, described_of, group_fields, has_turn, sample_of, samples_of
from strands_tito.export.trainer import (
    Decode,
    LogprobMismatchError,
    LogprobPolicy,
    SampledPlaceholderError,
    check_semantics,
    experts_of,
    logprobs_for,
    pictures_of,
    processed,
    refuse_images,
    refuse_stray_placeholders,
    warn_left_out,
    warn_without_agent,
)
from strands_tito.inspect.score import TEACHER
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.ledger import Ledger
from tito_core.termination import ANNOTATION, Termination

logger = logging.getLogger(__name__)

STATUS = MappingProxyType(
    {
        Termination.COMPLETED: "COMPLETED",
        Termination.TRUNCATED: "TRUNCATED",
        Termination.CONTEXT: "TRUNCATED",
        Termination.LIMIT: "TRUNCATED",
        Termination.TOOL_ERROR: "FAILED",
        Termination.TEMPLATE: "FAILED",
        Termination.ENGINE_ERROR: "FAILED",
        Termination.ABORTED: "ABORTED",
        Termination.CANCELLED: "ABORTED",
    }
)
"""The name of slime's status for each termination. `remove_sample` excludes rollouts that ended from outside."""

Branches = Literal["list", "last", "error"]
_KEPT = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")


class SlimeSample(Protocol):
    """The fields of slime's `Sample` that are used here."""

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
    processor: Any = None,
    images: bool = True,
    top_p_replay: bool = False,
    teacher: str = TEACHER,
) -> dict[str, Any]:
    """Return the fields of slime's `Sample` for a trajectory, except `status`.

    Args:
        sample: One trajectory.
        decode: Returns the text of token ids, special tokens included.
        temperature: slime's logit temperature, `--rollout-temperature`.
        logprobs: See `LogprobPolicy`; with "omit" `rollout_log_probs` is None.
        processor: The model's processor of transformers; needed for images.
        images: Whether to return and check what slime needs to train images; False for an evaluation.
        top_p_replay: Whether slime replays kept sets, which it does where its `--rollout-top-p` is not 1; then it
            needs those of every trained token.
        teacher: The column of `Teacher` that becomes `teacher_log_probs`.

    Returns:
        `tokens` of prompt and response; `response`, its text; `response_length`; `loss_mask` and `rollout_log_probs`
        of the response only, 0 and 0.0 on untrained tokens; `weight_versions` of the trained tokens, without unknown
        ones; `reward`, the rollout's plus those of the sample's own turns and calls, since slime reads one number a
        sample; `rollout_routed_experts`, int32, shape (tokens - 1, layers, experts), or None; `teacher_log_probs` of
        the response, 0.0 on placeholders of images, or None if the path was not scored; `remove_sample`; with
        `top_p_replay` `rollout_top_p_token_ids`, int32, flat, and `rollout_top_p_token_offsets`, int32, response tokens
        + 1; with images `multimodal_inputs`, Pillow's pictures, and `multimodal_train_inputs`, the processor's tensors.
        Arrays stand where slime takes a list or a tensor, because lists of experts would take seconds to make.

    Raises:
        ImagesNotSupportedError: The trajectory has images, but there is no processor: slime trains with its tensors.
        SampledPlaceholderError: The policy sampled the placeholder of images.
        ImageGridError: The processor makes another number of tokens of an image than the engine did.
        LogprobMismatchError: The logprobs are not the quantity that slime computes.
        ValueError: The engine reported experts for some tokens only.
    """
    values = logprobs_for(sample, temperature=temperature, trainer="slime", policy=logprobs, replays=top_p_replay)
    kept_ids, kept_offsets = _kept(sample, logprobs) if top_p_replay else (None, None)
    experts, scores = experts_of(sample), sample.scores.get(teacher)
    if scores is not None and logprobs != "as-recorded":  # slime subtracts them from log_softmax(logits / temperature)
        whose = f"{sample.identity.rollout_id} in column {teacher!r} (teacher='' leaves it out)"
        check_semantics(scores.semantics, temperature=temperature, trainer="slime", rollout=whose)
    response = slice(sample.prompt_length, None)
    return {
        "tokens": sample.token_ids.tolist(),
        "response": decode(sample.response_ids.tolist()),
        "response_length": sample.response_length,
        "loss_mask": sample.response_mask.tolist(),
        "rollout_log_probs": None if values is None else values[response].tolist(),
        "rollout_routed_experts": None if experts is None else experts.astype(np.int32),
        "rollout_top_p_token_ids": kept_ids,
        "rollout_top_p_token_offsets": kept_offsets,
        "weight_versions": [version for version in sample.trained_versions if version is not None],
        "teacher_log_probs": None if scores is None else np.nan_to_num(scores.logprobs[response]).tolist(),
        "reward": sample.total,
        "remove_sample": sample.ended_outside,
        **(_image_fields(sample, processor) if images else {}),
    }


def _kept(sample: TrainingSample, logprobs: LogprobPolicy) -> tuple[TokenIds, TokenIds]:
    """Return the response's kept sets, flat, and their offsets; a set is empty where none was recorded.

    slime reads an empty set as the sampled token alone (`_fill_topp_mask_rows` in its `loss.py`; `ppo_utils.py` adds
    the token): its logprob is 0 and has no gradient. That is harmless only where nothing is trained.

    Raises:
        LogprobMismatchError: With "checked": a trained token has no kept set.
    """
    if sample.kept is None:
        ids, offsets = np.zeros(0, np.int32), np.zeros(sample.response_length + 1, np.int32)
    else:
        kept = sample.kept.part(sample.prompt_length, len(sample))
        ids, offsets = kept.ids, kept.offsets
    empty = int((sample.response_mask.astype(np.bool_) & (np.diff(offsets) == 0)).sum())
    if empty and logprobs == "checked" and not sample.ended_outside:
        raise LogprobMismatchError(
            f"Law 11: {empty} trained tokens of rollout {sample.identity.rollout_id} have no kept set, so they were "
            "sampled greedily or without truncation. With --rollout-top-p slime reads an empty set as the sampled "
            "token alone: its logprob would be 0, and it would not be trained. Sample every trained turn with top_p "
            "or a finite top_k and optional_outputs={'sampling_mask': True, 'top_logprobs': top_k}, or train only "
            "the agent whose turns are: agent=, or slime's tito_trained_agent. Or pass logprobs='as-recorded' or "
            "'omit' to export without this check."
        )
    return ids, offsets


def _image_fields(sample: TrainingSample, processor: Any) -> dict[str, Any]:
    if processor is None:
        refuse_images(sample.images, "slime without a processor", sample.identity.rollout_id)
    refuse_stray_placeholders(sample.token_ids, sample.images, sample.media_ids, "slime", sample.identity.rollout_id)
    if not sample.images:
        return {"multimodal_train_inputs": None}  # a sample that slime passes again holds those of its last run
    tensors = processed(sample.images, processor)
    return {"multimodal_inputs": {"images": pictures_of(sample.images)}, "multimodal_train_inputs": tensors}


def fill(sample: S, rollout: Ledger, *, branches: Literal["last", "error"] = "error", **options: Any) -> S:
    """Write a rollout into slime's sample, in place, as one trajectory.

    Args:
        sample: slime's sample.
        rollout: The rollout. Without turns, or without one of the agent, the sample becomes `ABORTED`, without tokens.
        branches: See `sample_of`.
        **options: `decode`, `temperature`, `logprobs`, `processor`, `images` and `top_p_replay` of `fields_of`, and
            `train_constrained` and `agent` of `sample_of`.

    A trajectory whose policy sampled the placeholder of images becomes `ABORTED`, has no tokens and is not trained; a
    warning is logged, and `sample.metadata["tito"]["refused"]` has the reason.

    Raises:
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `fields_of`.
    """
    chosen = {name: options.pop(name) for name in ("agent", "train_constrained") if name in options}
    agent = chosen.get("agent")
    if has_turn(rollout, agent):
        filled = _filled(sample, sample_of(rollout, branches=branches, **chosen), options)
    else:
        filled = _without_turns(sample, rollout)
    warn_left_out([rollout], trainer="slime", agent=agent)
    return filled


def fan_out(sample: S, rollout: Ledger, **options: Any) -> list[S]:
    """Return one sample for each trajectory of a rollout: copies of slime's sample that share one `rollout_id`.

    slime's loss then counts the rollout once, and each sampled token is trained by exactly one of the samples.

    Args:
        sample: slime's sample; it is not changed.
        rollout: The rollout. Without turns, or without one of the agent, the result is one `ABORTED` sample.
        **options: As `fill`, also for a trajectory whose policy sampled the placeholder of images, and `max_paths` of
            `samples_of`.

    Raises:
        LogprobMismatchError, ValueError: As `samples_of` and `fields_of`.
    """
    chosen = {name: options.pop(name) for name in ("agent", "train_constrained", "max_paths") if name in options}
    found = samples_of(rollout, **chosen)
    if found and (most := chosen.get("max_paths")) is not None:
        warn_left_out([rollout], trainer="slime", agent=chosen.get("agent"), max_paths=most)
    copies = [_filled(copy.deepcopy(sample), each, options) for each in found]
    if not copies:
        copies = [_without_turns(copy.deepcopy(sample), rollout)]
        warn_without_agent([rollout], trainer="slime", agent=chosen.get("agent"))
    for one in copies:
        one.rollout_id = one.index if one.rollout_id is None else one.rollout_id
    return copies


def complete_aborted(
    sample: Any,
    *,
    logprobs: LogprobPolicy = "checked",
    experts: tuple[int, int] | None = None,
) -> Any:
    """Fill in the fields that slime's trainer requires of an aborted sample, in place; return other samples unchanged.

    slime computes no reward for an aborted sample, and its training fails on a reward of None or an empty response.
    As in slime's own agent example, the reward is 0 and an empty response becomes one untrained token.

    Args:
        sample: slime's sample.
        logprobs: As `fields_of`.
        experts: (layers, experts per token) if slime replays experts: it drops those of a whole batch if one sample
            has None.
    """
    if sample.status is not type(sample).Status.ABORTED:
        return sample
    if not sample.tokens:
        sample.tokens, sample.response, sample.response_length, sample.loss_mask = [0, 0], "", 1, [0]
        sample.rollout_log_probs = None if logprobs == "omit" else [0.0]
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [], [0, 0]
        if experts is not None:
            layers, chosen = experts
            sample.rollout_routed_experts = np.tile(np.arange(chosen, dtype=np.int32), (1, layers, 1))
    if sample.reward is None:
        sample.reward = 0.0
    sample.remove_sample = True
    return sample


_BY_GROUP = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
"""slime's advantage estimators that compare a reward with those of its group (`slime/ray/rollout.py`)."""


def normalizes(args: Any) -> bool:
    """Return whether slime compares rewards with those of a group."""
    return getattr(args, "advantage_estimator", "grpo") in _BY_GROUP and getattr(args, "rewards_normalization", True)


def rewards_by_group(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return raw and normalized rewards: a function for slime's `--custom-reward-post-process-path`.

    slime's own function counts on `--n-samples-per-prompt` samples for each prompt. Where a rollout has several samples
    or none, it compares the rewards of the whole batch with each other. This one compares within `group_index`, counts
    each rollout once, with the mean of its samples' rewards, and leaves out samples that are not trained
    (`remove_sample`) or have no reward: their normalized reward is 0.

    Args:
        args: slime's arguments. `tito_group_by` in `--custom-config-path` is "task", "agent" or "turn"; see `GroupBy`.
        samples: slime's samples, in any order.

    Returns:
        Two lists, one entry for each sample; a missing raw reward is 0.

    Raises:
        ValueError: A sample has no `group_index`, or `tito_group_by` is another word.
    """
    by = group_fields(getattr(args, "tito_group_by", "task"))
    found = [None if sample.reward is None else sample.get_reward_value(args) for sample in samples]
    raw = [0.0 if value is None else float(value) for value in found]
    if not normalizes(args):
        return raw, list(raw)
    counted = [value is not None and not sample.remove_sample for value, sample in zip(found, samples, strict=True)]
    if not by:
        _warn_of_agents([(one, value) for one, value, counts in zip(samples, raw, counted, strict=True) if counts])
    groups: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    keys: list[tuple[Any, ...]] = []
    for number, sample in enumerate(samples):
        if sample.group_index is None:
            raise ValueError(f"Sample {sample.index} has no group_index, so its reward cannot be compared.")
        keys.append((sample.group_index, *(_ours(sample, name) for name in by)))
        if counted[number]:
            groups.setdefault(keys[number], {}).setdefault(_rollout(sample), []).append(raw[number])
    scaled = getattr(args, "grpo_std_normalization", True) and args.advantage_estimator in _BY_GROUP - {_BASELINE}
    normalized = [0.0] * len(samples)
    for number in range(len(samples)):
        if counted[number]:
            rewards = np.array([np.mean(each) for each in groups[keys[number]].values()])
            spread = rewards.std(ddof=1) + 1e-6 if scaled and len(rewards) > 1 else 1.0
            normalized[number] = float((raw[number] - rewards.mean()) / spread)
    return raw, normalized


def _ours(sample: Any, name: str) -> Any:
    return (sample.metadata or {}).get("tito", {}).get(name)


def _rollout(sample: Any) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id


def _warn_of_agents(rewarded: Sequence[tuple[Any, float]]) -> None:
    """Log the agents whose own rewards are compared with those of other agents of the same rollout."""
    rewards: dict[Any, set[float]] = {}
    agents: dict[Any, set[str]] = {}
    for sample, reward in rewarded:
        rewards.setdefault(_rollout(sample), set()).add(reward)
        agents.setdefault(_rollout(sample), set()).add(_ours(sample, "agent") or "no agent")
    mixed = [name for name in agents if len(agents[name]) > 1 and len(rewards[name]) > 1]
    if mixed:
        logger.warning(
            "rollouts=<%d>, agents=<%s> | rewards of different agents are compared with each other. Set "
            "tito_group_by: agent in slime's --custom-config-path to compare those of each agent.",
            len(mixed), ", ".join(sorted(set[str]().union(*(agents[name] for name in mixed)))),
        )  # fmt: skip


_BASELINE = "reinforce_plus_plus_baseline"
"""The estimator whose rewards slime does not divide by their standard deviation."""


def reset_reward(sample: Any) -> None:
    """Remove the reward that `complete_aborted` set. Call it before slime runs the sample again."""
    if sample.status is type(sample).Status.ABORTED:
        sample.reward = None


def _filled(sample: S, trajectory: TrainingSample, options: dict[str, Any]) -> S:
    try:
        fields = fields_of(trajectory, **options)
    except SampledPlaceholderError as error:
        logger.warning("rollout=<%s> | not trained: %s", trajectory.identity.rollout_id, error)
        return _without_tokens(sample, {**metadata_of(trajectory)["tito"], "refused": str(error)})
    if fields["reward"] is None:
        del fields["reward"]  # slime then calls its reward model
    for name, value in fields.items():
        setattr(sample, name, value)
    sample.metadata = {**(sample.metadata or {}), **metadata_of(trajectory)}
    return _with_status(sample, STATUS[trajectory.termination])


def _without_turns(sample: S, rollout: Ledger) -> S:
    """Return the sample of a rollout without turns of the agent: aborted, with metadata as far as it is known."""
    known = {"rollout": rollout.uuid, **described_of(rollout), "termination": rollout.annotation(ANNOTATION)}
    return _without_tokens(sample, {**known, "logprobs": []})


def _without_tokens(sample: S, tito: dict[str, Any]) -> S:
    """Return the sample without tokens, aborted, and with `tito` as its metadata: slime has nothing to train."""
    empty: dict[str, Any] = {"tokens": [], "response": "", "response_length": 0, "loss_mask": [], "weight_versions": []}
    unset = ("rollout_log_probs", "teacher_log_probs", "rollout_routed_experts", "multimodal_train_inputs", *_KEPT)
    for name, value in {**empty, **dict.fromkeys(unset), "remove_sample": True}.items():
        setattr(sample, name, value)  # a sample that slime passes again holds those of its last run
    sample.metadata = {**(sample.metadata or {}), "tito": tito}
    return _with_status(sample, "ABORTED")


def metadata_of(trajectory: TrainingSample) -> dict[str, Any]:
    """Return what slime has no field for: rollout, group, task and agent, termination, and what the logprobs mean."""
    return {
        "tito": {
            "rollout": trajectory.identity.rollout_id,
            **trajectory.described,
            "termination": trajectory.termination.value,
            "logprobs": [str(semantics) for semantics in trajectory.semantics],
        }
    }


def _with_status(sample: S, name: str) -> S:
    sample.status = type(sample).Status[name]
    return sample
