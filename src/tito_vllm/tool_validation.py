"""Validation of tool calls, by the name that users of strands-vllm import."""

from __future__ import annotations

from collections.abc import Mapping

from strands.hooks import BeforeToolCallEvent

from tito_core.hooks import ToolCallGuard


class VLLMToolValidationHooks(ToolCallGuard):
    """`ToolCallGuard` with strands-vllm's arguments.

    Args:
        include_allowed_tools_in_errors: Whether the error about an unknown tool lists the tools.
        max_allowed_tools_in_error: Maximum number of tools that it lists.
        validate_input_shape: Whether arguments must match the tool's whole JSON Schema.
    """

    def __init__(
        self,
        include_allowed_tools_in_errors: bool = True,
        max_allowed_tools_in_error: int = 25,
        validate_input_shape: bool = True,
    ) -> None:
        super().__init__(max_allowed_tools_in_error if include_allowed_tools_in_errors else None)
        self.include_allowed_tools_in_errors = include_allowed_tools_in_errors
        self.max_allowed_tools_in_error = max_allowed_tools_in_error
        self.validate_input_shape = validate_input_shape

    def before_tool_call(self, event: BeforeToolCallEvent) -> None:
        """Cancel an invalid call by setting `cancel_tool`."""
        self.check_call(event)

    def check_call(self, event: BeforeToolCallEvent) -> None:
        """Cancel an invalid call."""
        if event.selected_tool is not None and not self.validate_input_shape:
            return
        if event.selected_tool is not None and not isinstance(event.tool_use["input"], Mapping):
            name = event.tool_use["name"]
            event.cancel_tool = f"The arguments of {name!r} must be an object, not {event.tool_use['input']!r}."
            return
        super().check_call(event)
