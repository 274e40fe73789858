"""verl: a rollout as an `AgentLoopOutput`. `strands_tito.integrations.verl_loop` runs Strands agents inside verl."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PrivateAttr

from strands_tito.export.sample import (
    DESCRIBED,
    TrainingSample,
    counted_last,
    described_of,
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
    pictures_of,
    processed,
    prompt_response_of,
    warn_left_out,
)
from tito_core.ledger.ledger import Ledger
from tito_core.termination import ANNOTATION

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopOutput


def output_of(
    rollout: Ledger,
    *,
    temperature: float,
    end_id: int,
    branches: Literal["error", "last"] = "error",
    agent: str | None = None,
    train_constrained: bool = False,
    **options: Any,
) -> AgentLoopOutput:
    """Return a rollout as one output, which every version of verl takes.

    Args:
        rollout: The rollout. Without turns, or without one of the agent, the output is one untrained end token.
        temperature: verl's logit temperature, `rollout.temperature`.
        end_id: The tokenizer's end-of-sequence id.
        branches: See `sample_of`.
        agent: See `sample_of`.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        **options: `logprobs` (see `LogprobPolicy`); `prompt_length` and `response_length` of verl's configuration;
            `messages`, the number of messages, and `generating_s`, seconds of generation, for verl's metrics;
            `processor`, verl's own, with which the number of tokens of each image is checked.

    `reward_score` is the rollout's reward plus those of the row's turns and calls. verl's v1 trainer calls `as_dict`,
    which has each on its own token in `rm_scores`; other trainers of verl put the sum on the last token.

    Images are in `multi_modal_data["images"]`, as Pillow's pictures; verl computes their tensors itself.

    Raises:
        MissingPackageError: verl is not installed, or Pillow for a rollout with images.
        SampledPlaceholderError: The policy sampled the placeholder of images.
        ImageGridError: verl's processor makes another number of tokens of an image than the engine did.
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `prompt_response_of`.
    """
    chosen: Any = {"branches": branches, "agent": agent, "train_constrained": train_constrained}
    sample = sample_of(rollout, **chosen) if has_turn(rollout, agent) else None
    warn_left_out([rollout], trainer="verl", agent=agent)
    output = _output(sample, temperature, end_id, **options)
    if sample is None:
        known = {"termination": rollout.annotation(ANNOTATION), "rollout_id": rollout.uuid}
        output.extra_fields |= {**known, **described_of(rollout)}
    return output


_KEEP = (
    "Train one agent (trained_agent) or the last path (branches: last), record one reward for the whole rollout, or "
    "choose an algorithm.adv_estimator that reads each row, such as reinforce_plus_plus."
)


def outputs_of(
    rollout: Ledger,
    *,
    temperature: float,
    end_id: int,
    agent: str | None = None,
    train_constrained: bool = False,
    adv_estimator: str | None = None,
    max_paths: int | None = None,
    **options: Any,
) -> list[AgentLoopOutput]:
    """Return one output per trajectory, for verl's v1 trainer, which takes a list; see `output_of` and `samples_of`.

    Its GRPO takes the score and the mask of the last output for all outputs of a rollout: see `counted_last`. So with
    `adv_estimator="grpo"`, verl's `algorithm.adv_estimator`, rewards of another agent's turns are refused, which would
    be ignored. Where the estimator is not known, they are logged, as those of the same agent are.

    Raises:
        UnreadRewardError: See above. Others as `output_of`.
    """
    samples = samples_of(rollout, agent=agent, train_constrained=train_constrained, max_paths=max_paths)
    if not samples:
        return [output_of(rollout, temperature=temperature, end_id=end_id, agent=agent, **options)]
    if max_paths is not None:
        warn_left_out([rollout], trainer="verl", agent=agent, max_paths=max_paths)
    rows = [(one, _output(one, temperature, end_id, **options)) for one in counted_last(samples, rollout, agent)]
    rows.sort(key=lambda row: any(row[1].response_mask))  # a long prompt may leave no trained token of the last
    if adv_estimator in ("grpo", None):
        check_last_row(
            [sample for sample, _ in rows], trainer="verl's v1 GRPO", keep=_KEEP, refuse=adv_estimator is not None
        )
    outputs = [output for _, output in rows]
    for output in outputs if len(outputs) > 1 else ():
        output.extra_fields["reward_extra_info"] = {}  # verl copies it from the last output to the others
    return outputs


def _output(
    sample: TrainingSample | None,
    temperature: float,
    end_id: int,
    *,
    logprobs: LogprobPolicy = "checked",
    prompt_length: int | None = None,
    response_length: int | None = None,
    messages: int = 0,
    generating_s: float = 0.0,
    processor: Any = None,
) -> AgentLoopOutput:
    if sample is None:
        parts = empty_response(end_id, logprobs=logprobs != "omit")
    else:
        parts = prompt_response_of(
            sample,
            trainer="verl",
            temperature=temperature,
            logprobs=logprobs,
            max_prompt_length=prompt_length,
            max_response_length=response_length,
            takes_images=True,
        )
    loops = import_optional("verl.experimental.agent_loop.agent_loop", "verl")
    if parts.images and processor is not None:
        processed(parts.images, processor)
    fields = fields_of(parts, sample, messages=messages, generating_s=generating_s)
    fields["metrics"] = loops.AgentLoopMetrics(**fields["metrics"])
    output: AgentLoopOutput = _output_class()(**fields)
    if sample is not None and fields["reward_score"] is not None and not sample.ended_outside:
        output._rewards = parts.rewards(sample.reward)
    return output


@cache
def _output_class() -> type[AgentLoopOutput]:
    loops = import_optional("verl.experimental.agent_loop.agent_loop", "verl")

    class Output(loops.AgentLoopOutput):  # type: ignore[name-defined, misc]  # verl has no types
        """verl's output with a reward for each token, from which its v1 trainer makes `rm_scores`.

        verl's own puts `reward_score` on the last token, and the last output's score into all outputs of a rollout.
        """

        _rewards: list[float] | None = PrivateAttr(None)

        def __reduce__(self) -> tuple[Any, ...]:
            return _restored, (self.__getstate__(),)  # pickle finds no class inside of a function

        def as_dict(self) -> dict[str, Any]:
            fields: dict[str, Any] = super().as_dict()
            if self._rewards is not None and "rm_scores" in fields:
                fields["rm_scores"] = fields["rm_scores"].new_tensor(self._rewards)
            return fields

        def leave_reward(self, score: float | None) -> None:
            """Drop the recorded rewards: `score` is the row's, or verl computes one."""
            self.reward_score = score
            self._rewards = None if score is None else [0.0] * (len(self.response_ids) - 1) + [score]

    return Output


def _restored(state: dict[str, Any]) -> AgentLoopOutput:
    """Return an output that was pickled."""
    kind: Any = _output_class()
    output: AgentLoopOutput = kind.__new__(kind)
    output.__setstate__(state)
    return output


def fields_of(
    parts: PromptResponse, sample: TrainingSample | None, *, messages: int = 0, generating_s: float = 0.0
) -> dict[str, Any]:
    """Return the fields of verl's `AgentLoopOutput`; see `output_of`.

    A rollout that ended from outside, or has no turns of the agent, has reward 0 and is masked: with a reward of None
    it would take away those of its whole batch, since verl takes recorded rewards of all rollouts or of none.

    Args:
        parts: The prompt and response.
        sample: The trajectory that they come from, or None for a rollout without turns of the agent.
        messages: Number of messages.
        generating_s: Seconds of generation.
    """
    extra: dict[str, Any] = {"turn_scores": [], "tool_rewards": []}
    extra |= dict.fromkeys(("termination", "rollout_id", *DESCRIBED))
    if sample is not None:
        extra |= {"termination": sample.termination.value, "rollout_id": sample.identity.rollout_id, **sample.described}
        versions = sample.trained_versions
        steps = [int(each) for each in versions if each is not None and each.isdigit()]
        if steps and len(steps) == len(versions):  # else the rest may have been sampled before or after
            extra |= {"min_global_steps": min(steps), "max_global_steps": max(steps)}
    return {
        "prompt_ids": parts.prompt_ids,
        "response_ids": parts.response_ids,
        "response_mask": parts.mask,
        "response_logprobs": parts.logprobs,
        "routed_experts": parts.experts,
        "multi_modal_data": {"images": pictures_of(parts.images)} if parts.images else None,
        "reward_score": 0.0 if sample is None or sample.ended_outside else sample.total,
        "num_turns": messages,
        "metrics": {"generate_sequences": generating_s},
        "extra_fields": {**extra, "cut": parts.truncated},
    }
