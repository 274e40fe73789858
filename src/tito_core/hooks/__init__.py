"""Strands hooks for rollouts: loop limits that leave a complete history, and argument checks before tool calls."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tito_core.hooks.limits import (
        LoopLimiter,
        LoopLimitReachedError,
        MaxMessagesReachedError,
        MaxSampledTokensReachedError,
        MaxToolCallsReachedError,
        MaxToolIterationsReachedError,
    )
    from tito_core.hooks.tool_call_guard import ToolCallGuard
    from tito_core.parsing.schema import ToolSchemaError

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

_GUARD = {"ToolCallGuard", "ToolSchemaError"}


def __getattr__(name: str) -> object:
    """Import a hook on first use: the limiter does not need the JSON Schema library."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'tool_call_guard' if name in _GUARD else 'limits'}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
