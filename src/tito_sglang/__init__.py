"""The SGLang backend, and the names that users of strands-sglang import: `from tito_sglang import SGLangModel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tito_compat import ALIASES, named
from tito_core.aliases import alias_modules

if TYPE_CHECKING:
    from tito_compat.sglang import (
        LoopLimiter,
        LoopLimitReachedError,
        MaxMessagesReachedError,
        MaxToolCallsReachedError,
        MaxToolIterationsReachedError,
        Rollout,
        SGLangClient,
        SGLangModel,
        TokenManager,
        ToolIterationLimiter,
        ToolLimiter,
        get_client,
        get_client_from_slime_args,
        get_tokenizer,
    )

alias_modules(ALIASES)

__all__ = [
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "Rollout",
    "SGLangClient",
    "SGLangModel",
    "TokenManager",
    "ToolIterationLimiter",
    "ToolLimiter",
    "get_client",
    "get_client_from_slime_args",
    "get_tokenizer",
]


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing the package alone is cheap."""
    return named(__name__, name, "sglang" if name in __all__ else None)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
