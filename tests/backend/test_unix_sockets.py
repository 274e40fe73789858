"""A server behind a Unix socket, as with vLLM's `--uds`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.backends import KINDS, Kind, engine_of, request_of
from tito_conformance.testing import ScriptedEngine
from tito_core.backend import EngineConnectionError, create_backend
from tito_core.backend.generate import generate
from tito_core.backend.http.connection import Address


@asynccontextmanager
async def listening(engine: ScriptedEngine, path: Path) -> AsyncIterator[str]:
    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = await engine.handle(request.method, request.raw_path, headers, await request.content.read())
        return web.Response(status=answer.status, headers=dict(answer.headers), body=answer.content)

    runner = web.ServerRunner(web.Server(respond, handler_cancellation=True, access_log=None), shutdown_timeout=0.05)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield f"unix://{path}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_behind_a_unix_socket(kind: Kind, tmp_path: Path) -> None:
    engine = engine_of(kind)
    async with listening(engine, tmp_path / "engine.sock") as url:
        backend = create_backend(kind, url)
        response = await generate(backend, request_of())
        assert response.request_id == "r"
        await backend.abort("unknown")
        await backend.aclose()
    assert len(engine.requests) == 1


@pytest.mark.parametrize("address", ["unix://", "unix://engine.sock", "unix:///run/", "unix:///a\0b"])
def test_an_invalid_socket_address_is_refused(address: str) -> None:
    with pytest.raises(EngineConnectionError, match="Unix socket: give its absolute path"):
        create_backend("vllm", address)


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    path = f"/var/lib/kubelet/pods/{'0a1b2c3d-' * 8}/volumes/vllm.sock"
    with pytest.raises(EngineConnectionError, match=r"is too long: it has 112 bytes.*symbolic link") as caught:
        create_backend("vllm", f"unix://{path}")
    assert caught.value.reason == "address"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("unix:///run/vllm.sock", ("unix:///run/vllm.sock", "http://localhost", "/run/vllm.sock")),
        (" http://host:8000/ ", ("http://host:8000", "http://host:8000", None)),
    ],
)
def test_addresses(given: str, expected: tuple[Any, ...]) -> None:
    found = Address.of(given, backend="vllm")
    assert (found.shown, found.root, found.socket) == expected
