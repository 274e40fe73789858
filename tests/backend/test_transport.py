"""The transport on real sockets: connections, loops, threads, failures and cancellation."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from support.backends import (
    BACKENDS,
    EOS,
    KINDS,
    SOON_S,
    VOCAB,
    Handler,
    Kind,
    Received,
    Waits,
    backend_of,
    engine_name,
    engine_of,
    hash_policy,
    http_response,
    in_process,
    instant,
    request_of,
    soon,
)
from support.raw_server import RawServer
from tito_conformance.testing import (
    Fault,
    InProcessTransport,
    ScriptedRequest,
    ScriptedServer,
    WireResponse,
    always,
    first,
    scripted_server,
)
from tito_core.backend import (
    AuthenticationError,
    EngineTimeoutError,
    ProtocolViolationError,
)
from tito_core.backend.generate import generate, score
from tito_core.backend.http.backend import HttpBackend
from tito_core.backend.http.client import HttpResponse
from tito_core.backend.values import InvalidValueError
from tito_core.ledger.turn import Finish
from tito_sglang.backend import SGLangBackend


def served(kind: Kind, **options: Any) -> ScriptedServer:
    return scripted_server(kind, hash_policy(), **{"vocab_size": VOCAB, "eos_ids": [EOS], **options})


def backend_to(server: ScriptedServer, **options: Any) -> HttpBackend:
    return BACKENDS[server.engine.wire.name](server.base_url, **instant(options))


def connections(server: ScriptedServer) -> int:
    assert server._runner is not None
    assert server._runner.server is not None
    return len(server._runner.server.connections)


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("kind", KINDS)
def test_connections_are_closed_when_each_loop_ends(kind: Kind) -> None:
    with served(kind) as server:
        backend = backend_to(server)
        for n in range(5):
            asyncio.run(generate(backend, request_of(request_id=f"r{n}")))
            assert eventually(lambda: connections(server) == 0)
        assert len(server.engine.requests) == 5


def test_an_ended_loop_is_forgotten_with_its_client() -> None:
    with served("vllm") as server:
        backend = backend_to(server)
        loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

        async def run() -> None:
            loops.append(weakref.ref(asyncio.get_running_loop()))
            await generate(backend, request_of())

        for _ in range(3):
            asyncio.run(run())
        gc.collect()
        assert [loop() for loop in loops] == [None, None, None]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_backend_that_is_dropped_closes_its_connections(kind: Kind) -> None:
    async with served(kind) as server:
        backend = backend_to(server)
        await generate(backend, request_of())
        assert connections(server) > 0
        del backend
        gc.collect()
        assert await soon(lambda: connections(server) == 0)


async def test_one_loop_has_one_client_and_reuses_its_connections() -> None:
    async with served("vllm") as server:
        backend = backend_to(server)
        for n in range(10):
            await generate(backend, request_of(request_id=f"r{n}"))
        assert 1 <= connections(server) <= 4, "connecting asks four things at once, and the ten open no more"
        await backend.aclose()


async def test_a_server_without_http_is_asked_four_times() -> None:
    waits = Waits()
    with RawServer(b"220 mail.example ESMTP\r\n") as server:
        backend = BACKENDS["sglang"](server.url, sleep=waits)
        with pytest.raises(ProtocolViolationError, match=f"{server.url}/v1/models does not speak HTTP"):
            await backend.connect()
        assert len(waits.seconds) == 3
        await backend.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_the_awaiting_task_aborts_on_the_engine(kind: Kind) -> None:
    async with served(kind, latency=60.0) as server:
        backend = backend_to(server)
        task = asyncio.create_task(generate(backend, request_of(request_id="mine")))
        assert await soon(lambda: server.engine.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await soon(lambda: server.engine.running == 0)
        ended = {"vllm": "generate-tokens-mine", "sglang": "mine"}[kind]
        assert set(server.engine.disconnected + server.engine.aborted) == {ended}  # both ways may be seen
        assert [e.path for e in server.engine.exchanges if "abort" in e.path] == [
            {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}[engine_name(kind)]
        ]
        assert len(server.engine.requests) == 1
        await backend.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_ends_the_try_that_runs(kind: Kind) -> None:
    """Each retry has an id of its own, which only the backend knows."""

    def fails(_: int, request: ScriptedRequest) -> Fault | None:
        return Fault(status=503) if request.request_id == "mine" else None

    async with served(kind, latency=60.0, fault=fails) as server:
        backend = backend_to(server, sleep=Waits())
        task = asyncio.create_task(generate(backend, request_of(request_id="mine")))
        assert await soon(lambda: server.engine.running == 1 and len(server.engine.requests) == 2)
        await backend.abort("mine")
        assert (await asyncio.wait_for(task, SOON_S)).finish == Finish.ABORT
        await backend.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_scoring_is_aborted_too_when_it_is_cancelled(kind: Kind) -> None:
    async with served(kind, latency=60.0) as server:
        backend = backend_to(server)
        task = asyncio.create_task(score(backend, [5, 6, 7]))
        assert await soon(lambda: server.engine.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await soon(lambda: server.engine.running == 0)
        await backend.aclose()


async def test_a_second_cancellation_does_not_wait_for_a_hanging_abort() -> None:
    async with served("sglang", latency=60.0) as server:
        backend = backend_to(server)
        release = asyncio.Event()
        reached = asyncio.Event()

        async def hang(request_id: str) -> None:
            reached.set()
            await release.wait()

        backend.abort = hang
        task = asyncio.create_task(generate(backend, request_of()))
        assert await soon(lambda: server.engine.running == 1)
        task.cancel()
        await asyncio.wait_for(reached.wait(), SOON_S)
        assert not task.done(), "the abort comes before anything else"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        await backend.aclose()


async def test_aclose_waits_for_an_abort_that_is_under_way(caplog: pytest.LogCaptureFixture) -> None:
    """A second cancellation leaves the abort alone, whose connection `aclose` would close."""
    events: list[str] = []
    aborting, answer = asyncio.Event(), asyncio.Event()

    class Transport(InProcessTransport):
        async def send(self, method: str, url: str, headers: Mapping[str, str], body: Any) -> HttpResponse:
            if url.endswith("/abort_request"):
                aborting.set()
                await answer.wait()
                events.append("aborted")
            return await super().send(method, url, headers, body)

        async def aclose(self) -> None:
            events.append("closed")

    engine = engine_of("sglang", fault=always(Fault(hang=True)))
    backend = SGLangBackend("http://scripted", http_transport=lambda: Transport(engine))
    task = asyncio.ensure_future(backend.generate(request_of()))
    assert await soon(lambda: engine.running == 1)
    task.cancel()
    await aborting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    closing = asyncio.ensure_future(backend.aclose())
    await asyncio.sleep(0)
    answer.set()
    await closing
    assert events == ["aborted", "closed"]
    assert caplog.text == ""


async def test_a_cancellation_during_the_abort_of_a_broken_try_is_not_lost() -> None:
    """Otherwise the request would be retried in a cancelled task."""
    async with served("sglang", fault=always(Fault(reset_after=30))) as server:
        backend = backend_to(server)
        reached = asyncio.Event()

        async def hang(request_id: str) -> None:
            reached.set()
            await asyncio.sleep(0.2)

        backend.abort = hang
        task = asyncio.create_task(generate(backend, request_of()))
        await asyncio.wait_for(reached.wait(), SOON_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.engine.requests) == 1
        await asyncio.sleep(0.25)
        await backend.aclose()


async def test_a_failed_abort_does_not_hide_the_error() -> None:
    engine = engine_of("sglang", fault=always(Fault(hang=True)))
    backend = backend_of(engine, timeout_s=0.05)

    async def fail(request_id: str) -> None:
        raise RuntimeError("the abort itself failed")

    backend.abort = fail
    with pytest.raises(EngineTimeoutError):
        await generate(backend, request_of())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_closed_coroutine_closes_its_connection(kind: Kind) -> None:
    """Closing may not await: an abort there would be `RuntimeError: coroutine ignored GeneratorExit`."""
    async with served(kind, fault=always(Fault(hang=True))) as server:
        backend = backend_to(server)
        await backend.connect()
        running = generate(backend, request_of())
        waiting = asyncio.ensure_future(asyncio.wait_for(running, None))
        assert await soon(lambda: server.engine.running == 1)
        running.close()
        assert await soon(lambda: server.engine.running == 0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await backend.aclose()


# Keys and proxies.

SECRET = "sk-very-secret-0123456789"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["argument", "environment"])
async def test_the_key_is_sent_as_bearer_from_either_place(
    kind: Kind, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("TITO_API_KEY", SECRET + "\n")
    async with served(kind, api_key=SECRET) as server:
        backend = backend_to(server, api_key=SECRET if how == "argument" else None)
        await generate(backend, request_of())
        assert server.engine.requests[0].headers["authorization"] == f"Bearer {SECRET}"
        assert SECRET not in repr(backend) + repr(backend.http) + repr(await backend.connect())
        await backend.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_key_no_header_is_sent(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TITO_API_KEY", raising=False)
    async with served(kind, api_key=SECRET) as server:
        for key in (None, "", "wrong"):
            if key is not None:  # an argument goes before the environment, an empty one too
                monkeypatch.setenv("TITO_API_KEY", SECRET)
            backend = backend_to(server, api_key=key)
            with pytest.raises(AuthenticationError, match=r"answered 401: Unauthorized\. .*api_key"):
                await backend.connect()
            await backend.aclose()
    assert len(server.engine.exchanges) == 3, "another key is not tried by itself"


def behind(kind: Kind, handler: Callable[[Received], Any], **options: Any) -> HttpBackend:
    return BACKENDS[kind]("http://scripted", **instant({"http_transport": in_process(Handler(handler)), **options}))


@pytest.mark.parametrize("kind", KINDS)
async def test_headers_for_a_gateway_go_with_every_request_and_are_hidden(kind: Kind) -> None:
    engine, seen = engine_of(kind, fault=first(1, Fault(reset_after=0))), list[str]()

    async def gateway(request: Received) -> WireResponse:
        if request.headers.get("x-api-key") != SECRET:
            return http_response(401, json={"error": f"{request.headers.get('x-api-key')} is not a key"})
        seen.append(request.path)
        return await engine.handle(request.method, request.path, request.headers, request.content)

    backend = behind(kind, gateway, headers={"X-API-Key": SECRET})
    await generate(backend, request_of())
    assert any("abort" in path for path in seen)
    wrong = behind(kind, gateway, headers={"X-API-Key": SECRET[:-1]})
    with pytest.raises(AuthenticationError, match=r"<API key> is not a key.*in headers") as caught:
        await wrong.connect()
    assert SECRET[:-1] not in str(caught.value) + repr(wrong.http)


@pytest.mark.parametrize(
    "headers", [{"X-Request-ID": "a"}, {"Authorization": "Bearer a"}, {"a b": "c"}, {"X-Key": "schlüssel"}, {"a": 5}]
)
def test_headers_that_cannot_be_sent_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidValueError, match="headers") as caught:
        BACKENDS["vllm"]("http://h", headers=headers)
    assert "schl" not in str(caught.value)


async def test_a_server_with_a_key_for_administration_gets_it_for_that_alone(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang with `--admin-api-key` then refuses the other key for aborts and pauses (`utils/auth.py` of 0.5.23)."""
    engine = engine_of("sglang", fault=lambda number, _: Fault(hang=True))
    aborted, admin = list[str](), ("/abort_request", "/pause_generation", "/continue_generation")

    async def server(request: Received) -> WireResponse:
        if request.headers["authorization"] != ("Bearer ADMIN" if request.path in admin else "Bearer USER"):
            return http_response(401, json={"error": "Unauthorized"})
        aborted.extend([request.path] if request.path in admin else [])
        return await engine.handle(request.method, request.path, request.headers, request.content)

    for _ in range(2):
        backend = behind("sglang", server, api_key="USER", timeout_s=0.1)
        for name in ("r", "s"):
            with pytest.raises(EngineTimeoutError):
                await generate(backend, request_of(request_id=name))
    assert aborted == []
    lines = [record.getMessage() for record in caplog.records if "could not be aborted" in record.getMessage()]
    assert len(lines) == 2, "one line for each backend"
    assert "request r could not be aborted" in lines[0]
    assert "pass it as admin_api_key" in lines[0]
    backend = behind("sglang", server, api_key="USER", admin_api_key="ADMIN", timeout_s=0.1)
    with pytest.raises(EngineTimeoutError):
        await generate(backend, request_of())
    await backend.pause()
    await backend.resume()
    assert aborted == list(admin)


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a\x00b"])
def test_an_invalid_key_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(AuthenticationError, match="HTTP header") as caught:
        BACKENDS["vllm"]("http://h", api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_proxies_of_the_environment_are_not_used(
    kind: Kind, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with served(kind) as server:
        backend = backend_to(server, patience_s=0)
        await generate(backend, request_of())
        await backend.aclose()
