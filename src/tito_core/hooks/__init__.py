"""Strands hooks for rollouts: limits that leave a whole history behind, and a guard before every tool."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tito_core.hooks.argument_schema import ToolSchemaError
    from tito_core.hooks.limits import (
        LoopLimitReachedError,
        MaxMessagesReachedError,
        MaxSampledTokensReachedError,
        MaxToolCallsReachedError,
        MaxToolIterationsReachedError,
    )
    from tito_core.hooks.loop_limiter import LoopLimiter
    from tito_core.hooks.tool_call_guard import ToolCallGuard

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

_HOMES = {"LoopLimiter": "loop_limiter", "ToolCallGuard": "tool_call_guard", "ToolSchemaError": "argument_schema"}


def __getattr__(name: str) -> object:
    """Import a hook when it is first used: limits alone need no JSON Schema library."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'limits')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
