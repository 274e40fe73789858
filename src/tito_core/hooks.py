"""Strands hooks for rollouts: loop limits that leave a complete history, and checks of tool calls before they run."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from strands.hooks import (
    AfterModelCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    HookProvider,
    HookRegistry,
    MessageAddedEvent,
)
from strands.tools.tools import InvalidToolUseNameException, validate_tool_use_name
from strands.types.content import Message
from strands.types.exceptions import EventLoopException
from strands.types.tools import ToolSpec, ToolUse

from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger.errors import TITOError
from tito_core.parsing.schema import ToolSchema, ToolSchemaError, meaning

__all__ = [
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxSampledTokensReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "ToolCallGuard",
    "ToolSchemaError",
]

logger = logging.getLogger(__name__)


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


class LoopLimitReachedError(TITOError, EventLoopException):
    """An agent's loop reached a limit. Its history is complete: every tool call has its result.

    It is an `EventLoopException`, since Strands wraps any other error in one. Its `original_exception` is itself.

    Args:
        allowed: The limit; or the whole message, as other code that makes such errors passes it.
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


class ToolCallGuard(HookProvider):
    """Refuse calls of tools that do not exist, and calls with arguments that the tool's JSON Schema does not allow.

    A refused call gets an error as its result, which the policy reads next: the available tools, or the invalid
    arguments. Malformed calls are left to `malformed_calls`.

    Args:
        max_listed_tools: Maximum number of tools that an error lists; None lists none.

    Attributes:
        unknown_calls: Calls of unknown tools, by the name called.
        invalid_calls: Calls with invalid arguments, by tool.
    """

    def __init__(self, max_listed_tools: int | None = 25) -> None:
        self.max_listed_tools = max_listed_tools
        self.unknown_calls: Counter[str] = Counter()
        self.invalid_calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Empty both counters."""
        with self._lock:
            self.unknown_calls.clear()
            self.invalid_calls.clear()

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        """Register the callbacks with an agent."""
        registry.add_callback(BeforeInvocationEvent, self._check_schemas)
        registry.add_callback(BeforeToolCallEvent, self.check_call)
        registry.add_callback(AfterToolsEvent, self._list_tools)

    def _check_schemas(self, event: BeforeInvocationEvent) -> None:
        """Raise `ToolSchemaError` before the first model call, not in the middle of a rollout."""
        for spec in event.agent.tool_registry.get_all_tool_specs():
            _schema(spec)

    def check_call(self, event: BeforeToolCallEvent) -> None:
        """Refuse a call of an unknown tool, or with invalid arguments, by its `cancel_tool`."""
        name = event.tool_use["name"]
        if event.cancel_tool or name == MALFORMED_CALL:
            return
        if event.selected_tool is None:
            event.cancel_tool = self._unknown(name, sorted(event.agent.tool_registry.registry))
            return
        try:
            faults = _schema(event.selected_tool.tool_spec).faults(event.tool_use["input"])
        except ToolSchemaError as error:  # if it were raised, the call would have no result
            logger.warning("%s", error)
            event.cancel_tool = str(error)
            return
        if faults:
            with self._lock:
                self.invalid_calls[name] += 1
            event.cancel_tool = f"The arguments of {name!r} do not fit its schema: {'; '.join(faults)}."

    def _list_tools(self, event: AfterToolsEvent) -> None:
        """Replace Strands' error for a name that it allows for no tool, such as `a.b`, by that for unknown tools."""
        uses = [block["toolUse"] for block in event.agent.messages[-1]["content"] if "toolUse" in block]
        refused = {use["toolUseId"]: use["name"] for use in uses if not _is_tool_name(use)}
        for block in event.message["content"]:
            result = block["toolResult"]
            text = result["content"][0].get("text", "") if result["content"] else ""
            if result["toolUseId"] in refused and text.startswith("Error: tool_name="):
                name = refused[result["toolUseId"]]
                result["content"] = [{"text": self._unknown(name, sorted(event.agent.tool_registry.registry))}]

    def _unknown(self, name: str, names: Sequence[str]) -> str:
        with self._lock:
            self.unknown_calls[name] += 1
        return f"Unknown tool {name!r}. {self._listed(names)}".rstrip()

    def _listed(self, names: Sequence[str]) -> str:
        if self.max_listed_tools is None:
            return ""
        if not names:
            return "No tools are available."
        more = len(names) - self.max_listed_tools
        shown = ", ".join(names[: self.max_listed_tools])
        return f"Available tools: {shown}{f' and {more} more' if more > 0 else ''}."


def _call_ids(message: Message) -> list[str]:
    return [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]


def _position(messages: Sequence[Message], call_id: str) -> int:
    """Return the position of a call among those of the last message with calls; -1 if it is not in that message."""
    ids = next((ids for message in reversed(messages) if (ids := _call_ids(message))), [])
    return ids.index(call_id) if call_id in ids else -1  # a direct `agent.tool.x()` is in no message


def _schema(spec: ToolSpec) -> ToolSchema:
    return meaning(spec["inputSchema"].get("json", {}), spec["name"])


def _is_tool_name(use: ToolUse) -> bool:
    try:
        validate_tool_use_name(use)
    except InvalidToolUseNameException:
        return False
    return True
