"""verl: a rollout as an `AgentLoopOutput`. `strands_tito.integrations.verl_loop` runs Strands agents inside verl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.optional_dependency import import_optional
from strands_tito.export.prompt_response import PromptResponse, empty_response, prompt_response_of
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
    """Return a rollout as one output, which every version of verl takes.

    Args:
        rollout: The rollout. Without turns, the output is one untrained end token.
        temperature: verl's `rollout.temperature`, by which it divides its logits.
        end_id: The tokenizer's end-of-sequence id.
        branches: See `sample_of`.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        **options: `logprobs` (see `LogprobPolicy`); `prompt_length` and `response_length` of verl's configuration;
            `messages`, the number of messages, and `generating_s`, seconds of generation, for verl's metrics.

    Raises:
        MissingPackageError: verl is not installed.
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `prompt_response_of`.
    """
    if not len(rollout):
        return _output(empty_response(end_id, logprobs=options.get("logprobs") != "omit"), None, **options)
    return _of(sample_of(rollout, branches=branches, train_constrained=train_constrained), temperature, options)


def outputs_of(
    rollout: Ledger, *, temperature: float, end_id: int, train_constrained: bool = False, **options: Any
) -> list[AgentLoopOutput]:
    """Return one output per trajectory, for verl's v1 trainer, which takes a list; see `output_of`."""
    samples = samples_of(rollout, train_constrained=train_constrained)
    if not samples:
        return [output_of(rollout, temperature=temperature, end_id=end_id, **options)]
    return [_of(sample, temperature, options) for sample in samples]


def _of(sample: TrainingSample, temperature: float, options: dict[str, Any]) -> AgentLoopOutput:
    logprobs: LogprobPolicy = options.get("logprobs", "checked")
    parts = prompt_response_of(
        sample,
        trainer="verl",
        temperature=temperature,
        logprobs=logprobs,
        max_prompt_length=options.get("prompt_length"),
        max_response_length=options.get("response_length"),
    )
    return _output(parts, sample, **options)


def _output(
    parts: PromptResponse, sample: TrainingSample | None, *, messages: int = 0, generating_s: float = 0.0, **_: Any
) -> AgentLoopOutput:
    loops = import_optional("verl.experimental.agent_loop.agent_loop", "verl")
    extra: dict[str, Any] = {"turn_scores": [], "tool_rewards": [], "termination": None, "rollout_id": None}
    if sample is not None:
        extra |= {"termination": sample.termination.value, "rollout_id": sample.identity.rollout_id}
        steps = [int(each) for each in sample.trained_versions if each is not None and each.isdigit()]
        if steps:
            extra |= {"min_global_steps": min(steps), "max_global_steps": max(steps)}
    output: AgentLoopOutput = loops.AgentLoopOutput(
        prompt_ids=parts.prompt_ids,
        response_ids=parts.response_ids,
        response_mask=parts.mask,
        response_logprobs=parts.logprobs,
        routed_experts=parts.experts,
        reward_score=None if sample is None else sample.reward,
        num_turns=messages,
        metrics=loops.AgentLoopMetrics(generate_sequences=generating_s),
        extra_fields={**extra, "cut": parts.truncated},
    )
    return output
