"""verl's `AgentLoopOutput`, from a rollout. The loop that runs Strands agents inside verl is in `verl_loop`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from strands_tito.export.flat import Flat, flat_of, nothing
from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.missing import imported
from strands_tito.export.sample import TrainingSample, sample_of, samples_of
from tito_core.ledger.ledger import Ledger

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopOutput


def output_of(
    rollout: Ledger,
    *,
    temperature: float,
    end_id: int,
    branches: Literal["error", "last"] = "error",
    train_constrained: bool = False,
    **options: Any,
) -> AgentLoopOutput:
    """Return a rollout as one output, as every version of verl takes it.

    Args:
        rollout: The rollout. One without a turn is an untrained end token.
        temperature: verl's `rollout.temperature`, which it divides its logits by.
        end_id: The tokenizer's end of sequence.
        branches: See `sample_of`.
        train_constrained: Whether tokens under a grammar are trained.
        **options: `logprobs` (see `LogprobPolicy`), `prompt_length` and `response_length` of verl's configuration,
            `messages` of the conversation and `generating_s` for its metrics.

    Raises:
        MissingPackageError: verl is not installed.
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `flat_of`.
    """
    if not len(rollout):
        return _output(nothing(end_id, logprobs=options.get("logprobs") != "omit"), None, **options)
    return _of(sample_of(rollout, branches=branches, train_constrained=train_constrained), temperature, options)


def outputs_of(
    rollout: Ledger, *, temperature: float, end_id: int, train_constrained: bool = False, **options: Any
) -> list[AgentLoopOutput]:
    """Return an output for each trajectory of a rollout, for verl's v1 trainer, which takes a list; see `output_of`."""
    found = samples_of(rollout, train_constrained=train_constrained)
    if not found:
        return [output_of(rollout, temperature=temperature, end_id=end_id, **options)]
    return [_of(sample, temperature, options) for sample in found]


def _of(sample: TrainingSample, temperature: float, options: dict[str, Any]) -> AgentLoopOutput:
    logprobs: LogprobPolicy = options.get("logprobs", "checked")
    flat = flat_of(
        sample,
        trainer="verl",
        temperature=temperature,
        logprobs=logprobs,
        most_prompt=options.get("prompt_length"),
        most_response=options.get("response_length"),
    )
    return _output(flat, sample, **options)


def _output(
    flat: Flat, sample: TrainingSample | None, *, messages: int = 0, generating_s: float = 0.0, **_: Any
) -> AgentLoopOutput:
    loops = imported("verl.experimental.agent_loop.agent_loop", "verl")
    extra: dict[str, Any] = {"turn_scores": [], "tool_rewards": [], "termination": None, "rollout_id": None}
    if sample is not None:
        extra |= {"termination": sample.termination.value, "rollout_id": sample.identity.rollout_id}
        steps = [int(each) for each in sample.trained_versions if each is not None and each.isdigit()]
        if steps:
            extra |= {"min_global_steps": min(steps), "max_global_steps": max(steps)}
    found: AgentLoopOutput = loops.AgentLoopOutput(
        prompt_ids=flat.prompt_ids,
        response_ids=flat.response_ids,
        response_mask=flat.mask,
        response_logprobs=flat.logprobs,
        routed_experts=flat.experts,
        reward_score=None if sample is None else sample.reward,
        num_turns=messages,
        metrics=loops.AgentLoopMetrics(generate_sequences=generating_s),
        extra_fields={**extra, "cut": flat.cut},
    )
    return found
