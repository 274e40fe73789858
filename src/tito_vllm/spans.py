"""OpenTelemetry spans of a rollout's turns, with the attribute names of strands-vllm and Agent Lightning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from strands_tito.export.trainer import LogprobPolicy, TrainedTurn, trained_turns
from tito_core.ledger.ledger import Ledger

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SPAN = "openai.chat.completion"
"""The span name that Agent Lightning 0.3's `TracerTraceToTriplet` looks for."""
Attributes = dict[str, str | int | list[int]]


def attributes_of(trained: TrainedTurn, *, logprobs: bool = True) -> Attributes:
    """Return the span attributes of a turn.

    Returns:
        `llm.token_count.prompt`, `llm.token_count.completion`, `llm.hosted_vllm.prompt_token_ids` and
        `llm.hosted_vllm.response_token_ids`, as strands-vllm sets them; `prompt_token_ids`, `response_token_ids`,
        `logprobs.content` (JSON) and `gen_ai.response.id`, as Agent Lightning 0.3 reads them.
    """
    draft = trained.turn.draft
    prompt, output = trained.prompt_ids.tolist(), draft.output_ids.tolist()
    attributes: Attributes = {
        "llm.token_count.prompt": len(prompt),
        "llm.token_count.completion": len(output),
        "llm.hosted_vllm.prompt_token_ids": prompt,
        "llm.hosted_vllm.response_token_ids": output,
        "prompt_token_ids": prompt,
        "response_token_ids": output,
        "gen_ai.response.id": draft.engine.request_id,
    }
    if logprobs:
        attributes["logprobs.content"] = json.dumps([{"logprob": value} for value in draft.logprobs.tolist()])
    return attributes


def emit_spans(
    rollout: Ledger,
    tracer: Tracer,
    *,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
) -> int:
    """Emit one span for each trained turn, path by path.

    Args:
        rollout: The rollout.
        tracer: The tracer that starts the spans.
        temperature: The trainer's logit temperature.
        logprobs: See `LogprobPolicy`.
        train_constrained: Whether to include turns that were sampled under a grammar.

    Returns:
        The number of spans.

    Raises:
        LogprobMismatchError: The semantics of a turn's logprobs differ from the trainer's.
    """
    count = 0
    for trained in trained_turns(
        rollout,
        trainer="the reader of the spans",
        temperature=temperature,
        logprobs=logprobs,
        train_constrained=train_constrained,
    ):
        tracer.start_span(SPAN, attributes=attributes_of(trained, logprobs=logprobs != "omit")).end()
        count += 1
    return count
