"""Limit an agent's loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from strands.hooks import (
    AfterModelCallEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    HookProvider,
    HookRegistry,
    MessageAddedEvent,
)
from strands.types.content import Message
from strands.types.exceptions import EventLoopException


class LoopLimitReachedError(EventLoopException):
    """An agent's loop reached a limit. Its history is complete: every tool call has its result.

    It is an `EventLoopException`, since Strands wraps any other error in one. Its `original_exception` is itself.

    Args:
        allowed: The limit; or the whole message, as pickle and other code that makes such errors pass it.
        reached: The count that reached the limit. Default: None, the limit itself.

    Attributes:
        allowed: The limit.
        reached: The count that reached it.
    """

    counted = "steps"

    def __init__(self, allowed: int | str, reached: int | None = None) -> None:
        reached = reached if isinstance(allowed, str) or reached is not None else allowed
        message = f"Max {self.counted} ({allowed}) reached: the agent's loop has {reached}."
        super().__init__(Exception(allowed if isinstance(allowed, str) else message))
        self.original_exception = self
        self.allowed = allowed
        self.reached = reached


class MaxToolIterationsReachedError(LoopLimitReachedError):
    """The loop reached `max_tool_iters`. The results of the last allowed iteration are in the history."""

    counted = "tool iterations"


class MaxToolCallsReachedError(LoopLimitReachedError):
    """The loop reached `max_tool_calls`. The results of all calls of the last answer are in the history."""

    counted = "tool calls"


class MaxMessagesReachedError(LoopLimitReachedError):
    """The loop reached `max_messages` before a model call."""

    counted = "messages"


class MaxSampledTokensReachedError(LoopLimitReachedError):
    """The loop reached `max_sampled_tokens` before a model call."""

    counted = "sampled tokens"


class LoopLimiter(HookProvider):
    """End an agent's loop at its limits, always just before a model call.

    At that point every tool call has its result and every hook has seen every message, so the next invocation continues
    the same history. Several agents may share a limiter, and with it the limits.

    The limits are attributes and may be changed at any time; None means no limit. `max_tool_iters` and
    `max_tool_calls` end the loop after tools; `max_messages` and `max_sampled_tokens` also before the first answer of
    an invocation. Counters continue over invocations until `reset`.

    Args:
        max_tool_iters: Maximum answers with tool calls.
        max_tool_calls: Maximum tool calls. All calls of one answer run, so the count may end above the limit.
        max_parallel_tool_calls: Maximum calls of one answer that run. Each other call gets an error as its result.
        max_messages: Maximum messages of all roles that Strands adds, including those of a direct `agent.tool.x()`.
        max_sampled_tokens: Maximum tokens of all answers, including answers that a hook discards for a retry. The
            answer that reaches the limit is not cut off, so the count may end above it; `max_new_tokens` limits each
            answer.

    Attributes:
        tool_iter_count: Answers with tool calls so far.
        tool_call_count: Tool calls so far.
        cancelled_tool_call_count: Calls so far that did not run because of `max_parallel_tool_calls`.
        message_count: Messages so far.
        sampled_token_count: Tokens so far, as the model's usage reports them.
    """

    def __init__(
        self,
        max_tool_iters: int | None = None,
        max_tool_calls: int | None = None,
        max_parallel_tool_calls: int | None = None,
        max_messages: int | None = None,
        max_sampled_tokens: int | None = None,
    ) -> None:
        self.max_tool_iters = max_tool_iters
        self.max_tool_calls = max_tool_calls
        self.max_parallel_tool_calls = max_parallel_tool_calls
        self.max_messages = max_messages
        self.max_sampled_tokens = max_sampled_tokens
        self._lock = threading.Lock()  # agents that run as tools may be on other threads
        self.reset()

    def reset(self) -> None:
        """Set all counters to 0."""
        with self._lock:
            self.tool_iter_count = 0
            self.tool_call_count = 0
            self.cancelled_tool_call_count = 0
            self.message_count = 0
            self.sampled_token_count = 0

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        """Register the callbacks with an agent."""
        registry.add_callback(MessageAddedEvent, self._count_message)
        registry.add_callback(AfterModelCallEvent, self._count_tokens)
        registry.add_callback(BeforeToolCallEvent, self._cancel_excess)
        registry.add_callback(BeforeModelCallEvent, self._end)

    def _count_message(self, event: MessageAddedEvent) -> None:
        calls = len(_call_ids(event.message)) if event.message["role"] == "assistant" else 0
        with self._lock:
            self.message_count += 1
            self.tool_call_count += calls
            self.tool_iter_count += calls > 0

    def _count_tokens(self, event: AfterModelCallEvent) -> None:
        if event.stop_response is not None:
            usage = event.stop_response.message.get("metadata", {}).get("usage", {})
            with self._lock:
                self.sampled_token_count += usage.get("outputTokens", 0)

    def _cancel_excess(self, event: BeforeToolCallEvent) -> None:
        """Cancel calls by their position in the message, so that order and repetition of runs do not matter."""
        allowed = self.max_parallel_tool_calls
        if allowed is None or event.cancel_tool:
            return
        if _position(event.agent.messages, event.tool_use["toolUseId"]) >= allowed:
            with self._lock:
                self.cancelled_tool_call_count += 1
            event.cancel_tool = f"Max parallel tool calls ({allowed}) reached: this call was not executed."

    def _end(self, event: BeforeModelCallEvent) -> None:
        """Raise when a limit is reached."""
        messages = event.agent.messages
        after_tools = bool(messages) and any("toolResult" in block for block in messages[-1]["content"])
        limits: list[tuple[type[LoopLimitReachedError], int | None, int]] = [
            (MaxMessagesReachedError, self.max_messages, self.message_count),
            (MaxSampledTokensReachedError, self.max_sampled_tokens, self.sampled_token_count),
        ]
        if after_tools:
            limits = [
                (MaxToolIterationsReachedError, self.max_tool_iters, self.tool_iter_count),
                (MaxToolCallsReachedError, self.max_tool_calls, self.tool_call_count),
                *limits,
            ]
        for error, allowed, reached in limits:
            if allowed is not None and reached >= allowed:
                raise error(allowed, reached) from error(allowed, reached)  # code for other loops looks at the cause


def _call_ids(message: Message) -> list[str]:
    return [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]


def _position(messages: Sequence[Message], call_id: str) -> int:
    """Return the position of a call among those of the last message with calls; -1 if it is not in that message."""
    ids = next((ids for message in reversed(messages) if (ids := _call_ids(message))), [])
    return ids.index(call_id) if call_id in ids else -1  # a direct `agent.tool.x()` is in no message
