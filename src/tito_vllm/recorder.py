"""The ids of each turn as callbacks get them, by the name that users of strands-vllm know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from opentelemetry import trace


class RecordedTurn(TypedDict):
    """One answer: the whole prompt's ids, the sampled ids, and their logprobs; None for what its model did not say."""

    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    logprobs: list[float] | None


class VLLMTokenRecorder:
    """A callback handler that keeps what each answer of a `VLLMModel` with `return_token_ids=True` was made of.

    Each prompt begins with the prompt and the answer before it, unless the agent's history was changed. The model's
    own ledger holds the same, with its mask and branches, and needs no recorder.

    Args:
        inner: A callback handler that gets everything first.
        add_to_span: Whether the current OpenTelemetry span gets the ids, as Agent Lightning 0.3 reads them.

    Attributes:
        prompt_token_ids: The last prompt.
        token_ids: The last answer.
        history: Every answer, in order.
    """

    def __init__(self, inner: Callable[..., Any] | None = None, add_to_span: bool = True) -> None:
        self.inner = inner
        self.add_to_span = add_to_span
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.prompt_token_ids: list[int] | None = None
        self.token_ids: list[int] | None = None
        self.history: list[RecordedTurn] = []

    def __call__(self, **kwargs: Any) -> None:
        """Take one event of an agent."""
        if self.inner is not None:
            self.inner(**kwargs)
        event = kwargs.get("event")
        stop = event.get("messageStop") if isinstance(event, dict) else None
        fields = stop.get("additionalModelResponseFields") if isinstance(stop, dict) else None
        if not isinstance(fields, dict) or not {"prompt_token_ids", "token_ids"} & set(fields):
            return
        turn = RecordedTurn(
            prompt_token_ids=fields.get("prompt_token_ids"),
            token_ids=fields.get("token_ids"),
            logprobs=fields.get("logprobs"),
        )
        self.prompt_token_ids = turn["prompt_token_ids"] or self.prompt_token_ids
        self.token_ids = turn["token_ids"] or self.token_ids
        self.history.append(turn)
        if self.add_to_span:
            _tell(turn)


def _tell(turn: RecordedTurn) -> None:
    """Set the attributes on the current span, if it is recorded."""
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
