"""Refuse tool calls with an unknown tool or invalid arguments, with an error that the policy reads."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from strands.hooks import AfterToolsEvent, BeforeInvocationEvent, BeforeToolCallEvent, HookProvider, HookRegistry
from strands.tools.tools import InvalidToolUseNameException, validate_tool_use_name
from strands.types.tools import ToolSpec, ToolUse

from tito_core.chat.messages import MALFORMED_CALL
from tito_core.parsing.schema import ToolSchema, ToolSchemaError, meaning

logger = logging.getLogger(__name__)


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


def _schema(spec: ToolSpec) -> ToolSchema:
    return meaning(spec["inputSchema"].get("json", {}), spec["name"])


def _is_tool_name(use: ToolUse) -> bool:
    try:
        validate_tool_use_name(use)
    except InvalidToolUseNameException:
        return False
    return True
