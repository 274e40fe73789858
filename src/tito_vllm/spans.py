"""OpenTelemetry spans of a rollout's turns, with token ids by the names of strands-vllm and Agent Lightning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.turnwise import TrainedTurn, trained_turns
from tito_core.ledger.ledger import Ledger

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SPAN = "openai.chat.completion"
"""The name under which Agent Lightning 0.3's `TracerTraceToTriplet` finds a model's answer."""
Attributes = dict[str, str | int | list[int]]


def attributes_of(trained: TrainedTurn, *, logprobs: bool = True) -> Attributes:
    """Return a turn's attributes.

    Returns:
        `llm.token_count.prompt`, `llm.token_count.completion`, `llm.hosted_vllm.prompt_token_ids` and
        `llm.hosted_vllm.response_token_ids`, as strands-vllm sets them; `prompt_token_ids`, `response_token_ids`,
        `logprobs.content` (JSON) and `gen_ai.response.id`, as Agent Lightning 0.3 reads them.
    """
    draft = trained.turn.draft
    prompt, output = trained.prompt_ids.tolist(), draft.output_ids.tolist()
    found: Attributes = {
        "llm.token_count.prompt": len(prompt),
        "llm.token_count.completion": len(output),
        "llm.hosted_vllm.prompt_token_ids": prompt,
        "llm.hosted_vllm.response_token_ids": output,
        "prompt_token_ids": prompt,
        "response_token_ids": output,
        "gen_ai.response.id": draft.engine.request_id,
    }
    if logprobs:
        found["logprobs.content"] = json.dumps([{"logprob": value} for value in draft.logprobs.tolist()])
    return found


def emit_spans(
    rollout: Ledger,
    tracer: Tracer,
    *,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
) -> int:
    """Emit a span for each trained turn, a path's one after the other.

    Args:
        rollout: The rollout.
        tracer: Whose spans they are.
        temperature: What the trainer divides its logits by.
        logprobs: See `LogprobPolicy`.
        train_constrained: Whether turns under a grammar are trained, and so emitted.

    Returns:
        The number of spans.

    Raises:
        LogprobMismatchError: A turn's logprobs are another quantity than the trainer's.
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
