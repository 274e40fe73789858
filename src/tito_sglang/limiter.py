"""Limits of an agent's loop, by the names that users of strands-sglang know."""

from __future__ import annotations

from tito_core.hooks.loop_limiter import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
)

__all__ = [
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "ToolIterationLimiter",
    "ToolLimiter",
]

ToolLimiter = LoopLimiter


class ToolIterationLimiter(LoopLimiter):
    """A limiter of iterations alone, by its oldest name, which slime's example imports.

    Args:
        max_iterations: `max_tool_iters` of `LoopLimiter`.
    """

    def __init__(self, max_iterations: int | None = None) -> None:
        super().__init__(max_tool_iters=max_iterations)

    @property
    def iteration_count(self) -> int:
        """Answers so far that call tools."""
        return self.tool_iter_count
