"""The log of the wire records every exchange of the transport, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.backends import BACKENDS, KINDS, Kind, Waits, engine_of, in_process, over_socket, request_of
from support.scripted import tokenizer
from tito_conformance.connection import connect
from tito_conformance.log import WireLog
from tito_conformance.target import Target
from tito_conformance.testing import Fault, HashPolicy, ScriptedServer, always
from tito_conformance.wire import WireExchange
from tito_core.backend import EngineConnectionError
from tito_core.backend.generate import generate

pytestmark = pytest.mark.suite


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("carried", [in_process, over_socket])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_exchange_is_logged_unchanged(kind: Kind, carried: Any, streams: bool) -> None:
    engine = engine_of(kind)
    log = WireLog(carried(engine))
    backend = BACKENDS[kind]("http://scripted", api_key="secret", http_transport=log.transport, sleep=Waits())
    response = await generate(backend, request_of(), (lambda _: None) if streams else None)
    await backend.aclose()
    logged = sorted((one.method, one.path, one.sent, one.status, bytes(one.got)) for one in log.exchanges)
    assert logged == sorted(
        (one.method, one.path, one.body, one.response.status, one.response.content) for one in engine.exchanges
    )
    assert all(one.whole for one in log.exchanges)
    assert "secret" not in str(log.exchanges)
    assert log.exchanges[-1].headers["content-type"] == "application/json"
    assert str(response.output_ids.tolist())[1:-1].replace(" ", "") in bytes(log.exchanges[-1].got).decode() or streams


async def failed_exchange(carried: Any, fault: Fault) -> WireExchange:
    """Return the logged exchange of a generation that a fault ends."""
    log = WireLog(carried(engine_of("sglang", fault=always(fault))))
    backend = BACKENDS["sglang"]("http://scripted", http_transport=log.transport, patience_s=0)
    await backend.connect()
    with pytest.raises(EngineConnectionError):
        await backend.generate(request_of())
    await backend.aclose()
    return next(one for one in reversed(log.exchanges) if one.path == "/generate")


@pytest.mark.parametrize("carried", [in_process, over_socket])
async def test_the_start_of_a_broken_response_is_logged(carried: Any) -> None:
    broken = await failed_exchange(carried, Fault(close_after=20))
    assert (broken.status, len(broken.got), broken.whole) == (200, 20, False)


async def test_a_request_without_a_response_is_logged() -> None:
    lost = await failed_exchange(over_socket, Fault(reset_after=0))
    assert (lost.status, lost.whole) == (None, False)
    assert json.loads(lost.sent)["rid"] == "r"


async def test_a_server_behind_a_unix_socket_is_logged(tmp_path: Path) -> None:
    size = len(tokenizer())
    engine = engine_of("sglang", HashPolicy(size, eos_ids=[2]), vocab_size=size)
    serving = ScriptedServer(engine)
    runner = web.ServerRunner(web.Server(serving._respond, access_log=None), shutdown_timeout=0.05)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine.sock")).start()
    try:
        connected = await connect(Target("sglang", f"unix://{tmp_path}/engine.sock", tokenizer()))
        await generate(connected.policy.backend, request_of())
        assert [one.path for one in connected.recorder.log.exchanges] == ["/generate"]
        await connected.policy.backend.aclose()
    finally:
        await runner.cleanup()
