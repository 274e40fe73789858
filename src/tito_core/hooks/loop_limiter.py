"""Bounds an agent's loop."""

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
    """An agent's loop reached a limit and ended at a complete message: every call in its history has its result.

    Strands lets an `EventLoopException` out of its loop as it is, and wraps any other error in one; so this is one, and
    whoever unwraps it finds it again as its own `original_exception`.

    Args:
        allowed: The limit; or a whole sentence, as code that makes such errors itself, and pickle, give it.
        reached: The count that reached it; as many as are allowed when None.

    Attributes:
        allowed: The limit.
        reached: The count that reached it.
    """

    counted = "steps"

    def __init__(self, allowed: int | str, reached: int | None = None) -> None:
        reached = reached if isinstance(allowed, str) or reached is not None else allowed
        sentence = f"The agent's loop has {reached} {self.counted}, and {allowed} are allowed: it ends here."
        super().__init__(Exception(allowed if isinstance(allowed, str) else sentence))
        self.original_exception = self
        self.allowed = allowed
        self.reached = reached


class MaxToolIterationsReachedError(LoopLimitReachedError):
    """The results of the last iteration that is allowed are in the history."""

    counted = "tool iterations"


class MaxToolCallsReachedError(LoopLimitReachedError):
    """The results of the last call that is allowed are in the history, and those of its siblings."""

    counted = "tool calls"


class MaxMessagesReachedError(LoopLimitReachedError):
    """The last message that is allowed is in the history, and the model would be asked next."""

    counted = "messages"


class MaxSampledTokensReachedError(LoopLimitReachedError):
    """The policy has sampled all the tokens that are allowed, and would be asked next."""

    counted = "sampled tokens"


class LoopLimiter(HookProvider):
    """Ends an agent's loop at its limits, always just before the model would be asked again.

    There every call has its result, every hook has seen every message, and the next invocation goes on from the history
    as it is. One limiter may be given to several agents, which then share its limits.

    The limits are plain attributes and may be changed at any time; None is no limit. `max_tool_iters` and
    `max_tool_calls` end the loop after tools, `max_messages` and `max_sampled_tokens` also before the first answer of
    an invocation. Counters go on over invocations until `reset`.

    Args:
        max_tool_iters: Answers that call tools, however many each calls.
        max_tool_calls: Calls. Those of one answer all run, so the count may end above the limit.
        max_parallel_tool_calls: Calls of one answer that run. The others get an error that says so as their result.
        max_messages: Messages of all roles that Strands adds, those of a direct `agent.tool.x()` among them.
        max_sampled_tokens: Tokens of all answers, those that a hook discarded for a retry among them. The answer that
            reaches the limit is whole, so the count may end above it; `max_new_tokens` bounds each answer.

    Attributes:
        tool_iter_count: Answers so far that call tools.
        tool_call_count: Calls so far.
        cancelled_tool_call_count: Calls so far that did not run, since they were too many in one answer.
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
        """Listen to an agent."""
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
        """Cancel a call by its place in its message: the same one, whatever order calls run in and however often."""
        allowed = self.max_parallel_tool_calls
        if allowed is None or event.cancel_tool:
            return
        if _place(event.agent.messages, event.tool_use["toolUseId"]) >= allowed:
            with self._lock:
                self.cancelled_tool_call_count += 1
            event.cancel_tool = f"Of one message {allowed} tool calls are executed at most; this one was not."

    def _end(self, event: BeforeModelCallEvent) -> None:
        """Raise where a limit is reached."""
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


def _place(messages: Sequence[Message], call_id: str) -> int:
    """Return the place of a call among those of the last message that has any; -1 where it is none of them."""
    ids = next((ids for message in reversed(messages) if (ids := _call_ids(message))), [])
    return ids.index(call_id) if call_id in ids else -1  # a direct `agent.tool.x()` is in no message
