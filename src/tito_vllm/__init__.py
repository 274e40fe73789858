"""The vLLM backend, and the names that users of strands-vllm import: `from tito_vllm import VLLMModel`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tito_compat import ALIASES
from tito_core.aliases import alias_modules

if TYPE_CHECKING:
    from tito_compat.rollout import Token, TokenManager
    from tito_compat.spans import VLLMTokenRecorder
    from tito_compat.vllm import VLLMModel, VLLMModelConfig, VLLMToolValidationHooks, make_vllm_openai_model

alias_modules(ALIASES)

__all__ = [
    "Token",
    "TokenManager",
    "VLLMModel",
    "VLLMModelConfig",
    "VLLMTokenRecorder",
    "VLLMToolValidationHooks",
    "make_vllm_openai_model",
]

_MODULES = {"Token": "rollout", "TokenManager": "rollout", "VLLMTokenRecorder": "spans"}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing the package alone is cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"tito_compat.{_MODULES.get(name, 'vllm')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
