"""Limits of an agent's loop, by the names that users of strands-sglang import."""

from __future__ import annotations

from tito_core.hooks import (
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
    """Limit tool iterations only, by the oldest name, which slime's example imports.

    Args:
        max_iterations: See `max_tool_iters` of `LoopLimiter`.
    """

    def __init__(self, max_iterations: int | None = None) -> None:
        super().__init__(max_tool_iters=max_iterations)

    @property
    def iteration_count(self) -> int:
        """Tool iterations so far."""
        return self.tool_iter_count
