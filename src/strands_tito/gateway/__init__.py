"""An OpenAI address for any harness, which records every token that a policy samples."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_tito.gateway.agent import HarnessAgent, serving
    from strands_tito.gateway.gateway import Gateway

__all__ = ["Gateway", "HarnessAgent", "serving"]

_MODULES = {"Gateway": "gateway", "HarnessAgent": "agent", "serving": "agent"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
