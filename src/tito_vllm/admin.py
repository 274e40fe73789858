"""Changing the weights of a vLLM server, which has the calls for it only with `VLLM_SERVER_DEV_MODE=1`."""

from __future__ import annotations

import msgspec

from tito_core.backend.admin import AdminCalls, Running
from tito_core.backend.http_backend import HttpBackend
from tito_core.backend.transport import HttpRequest
from tito_vllm import wire


class VLLMAdmin(AdminCalls, HttpBackend):
    """The part of a backend that trains. Measured with 0.32.0, whose engine dies of a folder that is not there."""

    async def pause(self, running: Running = "keep") -> None:
        """Pause; every mode clears the prefix cache, so that no key or value of older weights is used again."""
        await self.http.send(HttpRequest(f"/pause?mode={running}", b""))

    async def resume(self) -> None:
        """Resume."""
        await self.http.send(HttpRequest("/resume", b""))

    async def weight_version(self) -> str | None:
        """Ask for the version; "default" until one is named."""
        said = await self.get_if_there("/weight_info", wire.WeightInfo)
        return said.weight_version if said else None

    async def _load(self, path: str, version: str) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self.http.send(HttpRequest("/collective_rpc", msgspec.json.encode(reload)))
        await self.http.send(HttpRequest("/update_weight_version", msgspec.json.encode({"new_version": version})))
