"""The SGLang backend, and the names that users of strands-sglang import: `from tito_sglang import SGLangModel`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tito_sglang.client import SGLangClient
    from tito_sglang.exceptions import (
        SGLangClientError,
        SGLangConnectionError,
        SGLangContextLengthError,
        SGLangDecodingError,
        SGLangHTTPError,
        SGLangThrottledError,
    )
    from tito_sglang.limiter import (
        LoopLimiter,
        LoopLimitReachedError,
        MaxMessagesReachedError,
        MaxToolCallsReachedError,
        MaxToolIterationsReachedError,
        ToolIterationLimiter,
        ToolLimiter,
    )
    from tito_sglang.rollout import Rollout
    from tito_sglang.sglang import SGLangModel
    from tito_sglang.token import Token, TokenManager
    from tito_sglang.tool_parser import HermesToolCallParser, ToolCallParser, ToolCallParseResult
    from tito_sglang.tool_parsers import UNKNOWN_TOOL_NAME, get_tool_parser
    from tito_sglang.utils import decode_routed_experts, get_client, get_client_from_slime_args, get_tokenizer

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

_MODULES = {
    "Rollout": "rollout",
    "SGLangClient": "client",
    "SGLangModel": "sglang",
    "Token": "token",
    "TokenManager": "token",
    "UNKNOWN_TOOL_NAME": "tool_parsers",
    "get_tool_parser": "tool_parsers",
    **dict.fromkeys(("HermesToolCallParser", "ToolCallParseResult", "ToolCallParser"), "tool_parser"),
    **dict.fromkeys((name for name in __all__ if name.startswith("SGLang") and name.endswith("Error")), "exceptions"),
    **dict.fromkeys(("decode_routed_experts", "get_client", "get_client_from_slime_args", "get_tokenizer"), "utils"),
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing the package alone is cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'limiter')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
