"""Changing the weights of an SGLang server."""

from __future__ import annotations

import msgspec

from tito_core.backend.admin import AdminCalls, Running
from tito_core.backend.http_backend import HttpBackend
from tito_core.backend.transport import HttpRequest
from tito_sglang import wire

_MODES: dict[Running, str] = {"keep": "retract", "abort": "abort"}
"""`in_place` would keep keys and values of the older weights, and recorded logprobs would be of neither."""


class SGLangAdmin(AdminCalls, HttpBackend):
    """The part of a backend that trains. Measured with 0.5.23, which dies of weights of another shape."""

    async def pause(self, running: Running = "keep") -> None:
        """Pause; generations that are kept are computed again from their tokens."""
        await self.http.send(HttpRequest("/pause_generation", msgspec.json.encode({"mode": _MODES[running]})))

    async def resume(self) -> None:
        """Resume."""
        await self.http.send(HttpRequest("/continue_generation", b"{}"))

    async def weight_version(self) -> str | None:
        """Ask for the version; "default" until one is named."""
        said = await self.get_if_there("/model_info", wire.ModelInfo)
        return said.weight_version if said else None

    async def _load(self, path: str, version: str) -> None:
        update = {"model_path": path, "weight_version": version, "flush_cache": True}
        await self.http.send(HttpRequest("/update_weights_from_disk", msgspec.json.encode(update)))
