"""Token ids of turns as OpenTelemetry attributes, as strands-vllm writes them and Agent Lightning reads them.

`VLLMTokenRecorder` records the turns of a running agent, on the current span too; `emit_spans` writes those of a
finished rollout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from opentelemetry import trace

from strands_tito.export.trainer import LogprobPolicy, TrainedTurn, trained_turns
from tito_core.backend.values import short_repr
from tito_core.ledger.ledger import Ledger

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


SPAN = "openai.chat.completion"
"""The span name that Agent Lightning 0.3's `TracerTraceToTriplet` looks for."""
Attributes = dict[str, str | int | list[int]]


class RecordedTurn(TypedDict):
    """The ids of the whole prompt, the sampled ids and their logprobs; None for fields that the event lacks."""

    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    logprobs: list[float] | None


class VLLMTokenRecorder:
    """A callback handler that records the ids of each turn of a `VLLMModel` with `return_token_ids=True`.

    Each prompt starts with the prompt and the answer before it, unless the agent's history changed. `model.ledger`
    holds the same ids, with mask and branches, and needs no recorder.

    Args:
        add_to_span: Whether to set the ids on the current OpenTelemetry span, as Agent Lightning 0.3 reads them.

    Attributes:
        prompt_token_ids: Ids of the last prompt.
        token_ids: Ids of the last answer.
        history: Every turn, in order.
    """

    def __init__(self, add_to_span: bool = True) -> None:
        self.add_to_span = add_to_span
        self.reset()

    def reset(self) -> None:
        """Remove all recorded turns."""
        self.prompt_token_ids: list[int] | None = None
        self.token_ids: list[int] | None = None
        self.history: list[RecordedTurn] = []

    def __call__(self, **kwargs: Any) -> None:
        """Handle one event of an agent.

        Raises:
            TypeError: The ids of an event are not integers.
        """
        event = kwargs.get("event")
        stop = event.get("messageStop") if isinstance(event, dict) else None
        fields = stop.get("additionalModelResponseFields") if isinstance(stop, dict) else None
        if not isinstance(fields, dict) or not {"prompt_token_ids", "token_ids"} & set(fields):
            return
        turn = RecordedTurn(
            prompt_token_ids=_ids(fields, "prompt_token_ids"),
            token_ids=_ids(fields, "token_ids"),
            logprobs=fields.get("logprobs"),
        )
        if turn["prompt_token_ids"] is not None:
            self.prompt_token_ids = turn["prompt_token_ids"]
        if turn["token_ids"] is not None:
            self.token_ids = turn["token_ids"]
        self.history.append(turn)
        if self.add_to_span:
            _set_span_attributes(turn)


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


def _ids(fields: Mapping[str, Any], name: str) -> list[int] | None:
    """Return the token ids of a field, or None if the event lacks it.

    Raises:
        TypeError: They are not a list of integers.
    """
    ids = fields.get(name)
    if ids is not None and not (isinstance(ids, list) and all(type(each) is int for each in ids)):
        raise TypeError(f"{name} of the model's event must be a list of integer token ids, not {short_repr(ids)}.")
    return ids


def _set_span_attributes(turn: RecordedTurn) -> None:
    """Set the ids on the current span, if it is recording."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    for ids, count, name in (
        (turn["prompt_token_ids"], "llm.token_count.prompt", "llm.hosted_vllm.prompt_token_ids"),
        (turn["token_ids"], "llm.token_count.completion", "llm.hosted_vllm.response_token_ids"),
    ):
        if ids is not None:
            span.set_attribute(count, len(ids))
            span.set_attribute(name, ids)
