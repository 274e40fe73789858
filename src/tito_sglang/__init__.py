"""The SGLang backend, and the names that users of strands-sglang import: `from tito_sglang import SGLangModel`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tito_compat import ALIASES
from tito_core.aliases import alias_modules

if TYPE_CHECKING:
    from tito_compat.sglang import (
        UNKNOWN_TOOL_NAME,
        HermesToolCallParser,
        LoopLimiter,
        LoopLimitReachedError,
        MaxMessagesReachedError,
        MaxToolCallsReachedError,
        MaxToolIterationsReachedError,
        Rollout,
        SGLangClient,
        SGLangClientError,
        SGLangConnectionError,
        SGLangContextLengthError,
        SGLangDecodingError,
        SGLangHTTPError,
        SGLangModel,
        SGLangThrottledError,
        Token,
        TokenManager,
        ToolCallParser,
        ToolCallParseResult,
        ToolIterationLimiter,
        ToolLimiter,
        decode_routed_experts,
        get_client,
        get_client_from_slime_args,
        get_tokenizer,
        get_tool_parser,
    )

alias_modules(ALIASES)

__all__ = [
    "UNKNOWN_TOOL_NAME",
    "HermesToolCallParser",
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "Rollout",
    "SGLangClient",
    "SGLangClientError",
    "SGLangConnectionError",
    "SGLangContextLengthError",
    "SGLangDecodingError",
    "SGLangHTTPError",
    "SGLangModel",
    "SGLangThrottledError",
    "Token",
    "TokenManager",
    "ToolCallParseResult",
    "ToolCallParser",
    "ToolIterationLimiter",
    "ToolLimiter",
    "decode_routed_experts",
    "get_client",
    "get_client_from_slime_args",
    "get_tokenizer",
    "get_tool_parser",
]


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing the package alone is cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tito_compat.sglang"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
