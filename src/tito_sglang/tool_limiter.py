"""Limits of an agent's loop, by the older module name that slime's example imports."""

from tito_sglang.limiter import (
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
    ToolIterationLimiter,
    ToolLimiter,
)

__all__ = ["MaxToolCallsReachedError", "MaxToolIterationsReachedError", "ToolIterationLimiter", "ToolLimiter"]
