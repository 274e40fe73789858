"""The vLLM backend, and the names that users of strands-vllm import: `from tito_vllm import VLLMModel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tito_compat import ALIASES, named
from tito_core.aliases import alias_modules

if TYPE_CHECKING:
    from tito_compat.rollout import Token, TokenManager
    from tito_compat.spans import VLLMTokenRecorder
    from tito_compat.vllm import VLLMModel, VLLMToolValidationHooks

alias_modules(ALIASES)

__all__ = ["Token", "TokenManager", "VLLMModel", "VLLMTokenRecorder", "VLLMToolValidationHooks"]

_MODULES = {
    "Token": "rollout",
    "TokenManager": "rollout",
    "VLLMModel": "vllm",
    "VLLMTokenRecorder": "spans",
    "VLLMToolValidationHooks": "vllm",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that importing the package alone is cheap."""
    return named(__name__, name, _MODULES.get(name))


def __dir__() -> list[str]:
    return [*globals(), *__all__]
