"""An OpenAI address for any harness, which records every token that a policy samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strands_tito.gateway.gateway import Gateway

__all__ = ["Gateway"]


def __getattr__(name: str) -> Any:
    if name == "Gateway":
        from strands_tito.gateway.gateway import Gateway

        return Gateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
