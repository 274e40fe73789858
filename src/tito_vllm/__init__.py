"""The vLLM backend, and the names that users of strands-vllm import: `from tito_vllm import VLLMModel`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tito_vllm.recorder import VLLMTokenRecorder
    from tito_vllm.token import Token, TokenManager
    from tito_vllm.tool_validation import VLLMToolValidationHooks
    from tito_vllm.vllm import VLLMModel, VLLMModelConfig, make_vllm_openai_model

__all__ = [
    "Token",
    "TokenManager",
    "VLLMModel",
    "VLLMModelConfig",
    "VLLMTokenRecorder",
    "VLLMToolValidationHooks",
    "make_vllm_openai_model",
]

_MODULES = {
    "Token": "token",
    "TokenManager": "token",
    "VLLMTokenRecorder": "recorder",
    "VLLMToolValidationHooks": "tool_validation",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing the package alone is cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'vllm')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
