"""Connecting: addresses, sockets, models and wrong servers; and how few round trips it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import (
    BACKENDS,
    EOS,
    KINDS,
    NO_ANSWER,
    WIRES,
    Handler,
    Kind,
    Received,
    Waits,
    answering,
    backend_of,
    engine_name,
    engine_of,
    http_response,
    in_process,
    over_socket,
    request_of,
    reserved,
)
from support.scripted import tokenizer
from tito_conformance.testing import Fault, HashPolicy, InProcessTransport, ScriptedEngine, WireResponse
from tito_core import Policy
from tito_core.backend import (
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
    UnknownBackendError,
    create_backend,
    installed_backends,
)
from tito_core.backend.generate import generate
from tito_core.backend.http.client import HttpResponse
from tito_core.backend.http.connection import Address, server_address
from tito_core.backend.id_text import Pieces
from tito_core.backend.values import InvalidValueError
from tito_core.policy import run_blocking


@pytest.mark.parametrize("kind", KINDS)
async def test_connect_reports_the_server(kind: Kind) -> None:
    engine = engine_of(kind, model="qwen", max_model_len=2048)
    backend = backend_of(engine)
    info = await backend.connect()
    assert (info.backend, info.model) == (kind, "qwen")
    assert info.max_model_len == {"vllm": 2048, "sglang": 2042}[engine_name(kind)]
    assert info.version == {"vllm": "0.32.0", "sglang": "0.5.23"}[engine_name(kind)]
    assert info.weight_version == "default"
    assert info.processed_logprobs is None
    count = len(engine.exchanges)
    assert await backend.connect() is info
    assert len(engine.exchanges) == count, "later calls give the first answer"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_model_name_lists_those_served(kind: Kind) -> None:
    with pytest.raises(BadRequestError, match=r"http://scripted .*'other'.*'scripted'.*model_id"):
        await backend_of(engine_of(kind), model="other").connect()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_other_kind_of_server_is_named_with_the_backend_to_use(kind: Kind) -> None:
    other: Kind = "sglang" if kind == "vllm" else "vllm"
    engine = engine_of(other)
    backend = BACKENDS[kind]("http://scripted", http_transport=lambda: InProcessTransport(engine), sleep=Waits())
    sentence = f"http://scripted .*{other}.*{kind}.*backend='{other}'"
    with pytest.raises(BadRequestError, match=sentence):
        await backend.connect()


WRONG: list[tuple[WireResponse, type[BackendError], str]] = [
    (http_response(200, json={"data": []}), BadRequestError, r"http://scripted .*no model.*start it"),
    (http_response(404), BadRequestError, r"http://scripted/v1/models .*404.*Check"),
    (http_response(200, text="<html>Welcome to nginx!</html>"), ProtocolViolationError, "Welcome to nginx.*{kind}"),
]


@pytest.mark.parametrize(("response", "error", "sentence"), WRONG)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_server_is_reported(kind: Kind, response: WireResponse, error: Any, sentence: str) -> None:
    with pytest.raises(error, match=sentence.format(kind=kind)):
        await answering(kind, lambda _: response).connect()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failed_connect_is_not_remembered(kind: Kind) -> None:
    engine, down = engine_of(kind), [True]

    async def handler(request: Received) -> WireResponse:
        if down[0]:
            return NO_ANSWER
        return await engine.handle(request.method, request.path, request.headers, request.content)

    backend = answering(kind, handler, patience_s=0)
    with pytest.raises(EngineConnectionError):
        await backend.connect()
    down[0] = False
    assert (await backend.connect()).model == "scripted"


@pytest.mark.parametrize("kind", KINDS)
async def test_properties_that_a_server_version_lacks_stay_unknown(kind: Kind) -> None:
    def handler(request: Received) -> WireResponse:
        if request.path == "/v1/models":
            return http_response(200, json={"data": [{"id": "m"}]})
        return http_response(404, json={"detail": "Not Found"})

    info = await answering(kind, handler).connect()
    assert (info.model, info.max_model_len, info.version, info.weight_version) == ("m", None, None, None)


@pytest.mark.parametrize("kind", WIRES)
async def test_an_adapter_is_refused_by_its_name_and_the_base_model_is_not(kind: Kind) -> None:
    """SGLang would sample from the base model, and neither engine tells the version of an adapter."""
    engine = engine_of(kind, adapters=["my-adapter"])
    for name in (None, "scripted"):
        info = await backend_of(engine, model=name).connect()
        assert (info.model, info.max_model_len) == ("scripted", 4096 - reserved(kind))
    with pytest.raises(BadRequestError, match=r"'my-adapter' is a LoRA adapter on the .*base model"):
        await backend_of(engine, model="my-adapter").connect()
    with pytest.raises(BadRequestError, match=r"'x'; it serves 'scripted'\. Pass"):
        await backend_of(engine, model="x").connect()


@pytest.mark.parametrize("parent", [None, "base"])
async def test_an_adapter_shows_by_its_parent_or_by_the_length_that_it_lacks(parent: str | None) -> None:
    adapter = {"id": "lora", "owned_by": "vllm", "parent": parent}
    models = [adapter, {"id": "base", "max_model_len": 512, "owned_by": "vllm"}]

    def handler(request: Received) -> WireResponse:
        return http_response(200, json={"data": models, "version": "1"})

    assert (await answering("vllm", handler).connect()).model == "base"
    with pytest.raises(BadRequestError, match="'lora' is a LoRA adapter"):
        await answering("vllm", handler, model="lora").connect()


def test_model_and_model_id_are_one_name() -> None:
    for kind in KINDS:
        for name in ("model", "model_id"):
            backend: Any = create_backend(kind, "http://h", **{name: "m"})
            assert backend._model == "m"
        with pytest.raises(InvalidValueError, match="model='a' and model_id='b' are two names of one setting"):
            create_backend(kind, "http://h", model="a", model_id="b")


def test_backends_are_found_by_name() -> None:
    assert {"sglang", "vllm"} <= set(installed_backends())
    for kind in KINDS:
        assert isinstance(create_backend(kind, "http://h"), BACKENDS[kind])
    with pytest.raises(UnknownBackendError, match=r"'vlm'.*sglang, vllm"):
        create_backend("vlm", "http://h")


GOOD: list[tuple[Any, str]] = [
    ("http://localhost:8000", "http://localhost:8000"),
    ("http://localhost:8000/", "http://localhost:8000"),
    ("http://localhost:8000///", "http://localhost:8000"),
    ("  http://localhost:8000\n", "http://localhost:8000"),
    ("HTTP://LOCALHOST:8000", "http://localhost:8000"),
    ("https://h", "https://h"),
    ("http://h:80/some/prefix/", "http://h/some/prefix"),
    ("http://[::1]:8000", "http://[::1]:8000"),
]
BAD: list[tuple[Any, str]] = [
    ("", "'' is not a server address"),
    ("   ", "is not a server address"),
    ("localhost:8000", "'localhost:8000' is not a server address"),
    ("127.0.0.1", "is not a server address"),
    ("ftp://h", "'ftp://h' is not a server address"),
    ("http://", "is not a server address"),
    ("//h", "is not a server address"),
    ("http://h:80a", "80a.*port"),
    ("http://h:99999", "99999.*out of range"),
    ("http://h:0", "no port between 1 and 65535"),
    ("http://h\x00", "is not a server address"),
    ("http://h?key=1", "query or a fragment"),
    ("http://h/#x", "query or a fragment"),
    ("http://h:8000/v1", "/v1.*root"),
    ("http://h:8000/v1/", "/v1"),
    (None, "None is not a server address"),
    (8000, "8000 is not a server address"),
]


@pytest.mark.parametrize(("given_url", "address"), GOOD)
def test_forms_of_one_address_are_equal(given_url: str, address: str) -> None:
    assert BACKENDS["vllm"](given_url).http.base_url == address


@pytest.mark.parametrize(("given_url", "sentence"), BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_address_is_one_sentence(kind: Kind, given_url: Any, sentence: str) -> None:
    with pytest.raises(EngineConnectionError, match=sentence) as caught:
        BACKENDS[kind](given_url)
    assert "http://localhost:8000" in str(caught.value)
    assert caught.value.backend == kind


@pytest.mark.parametrize("secret", ["http://user:hunter2@h:8000", "http://h:8000/?token=hunter2", "http://h#hunter2"])
def test_a_secret_in_an_address_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(EngineConnectionError, match="api_key") as caught:
        BACKENDS["vllm"](secret)
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=30))
@settings(deadline=None, max_examples=60)
def test_any_text_is_an_address_or_a_typed_error(text: str) -> None:
    for url in (text, f"http://{text}", f"http://h:{text}", f"http://h/{text}"):
        try:
            address = server_address(url, backend="vllm")
        except EngineConnectionError:
            continue
        assert address.startswith(("http://", "https://"))
        assert server_address(address, backend="vllm").lower() == address.lower()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_path_prefix_is_kept_before_every_path(kind: Kind) -> None:
    paths: list[str] = []

    def handler(request: Received) -> WireResponse:
        paths.append(request.path)
        status = 400 if request.method == "POST" else 200
        return http_response(status, json={"data": [{"id": "m"}], "version": "1"})

    backend = BACKENDS[kind]("http://h/models/a/", http_transport=over_socket(Handler(handler)))
    await backend.connect()
    assert all(path.startswith("/models/a/") for path in paths)


@pytest.mark.parametrize(("kind", "status"), [("vllm", 403), ("sglang", 404), ("vllm", 405), ("sglang", 501)])
async def test_what_a_gateway_does_not_offer_is_left_out_at_once(
    kind: Kind, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a path of the server's properties, or that of aborts: then a closed connection ends a generation."""
    connected, waits = list[bool](), Waits()
    engine = engine_of(kind, fault=lambda *_: Fault(hang=True) if connected else None)

    async def gateway(request: Received) -> WireResponse:
        if request.path not in ("/v1/models", "/generate", "/v1/completions"):
            return http_response(status, text="no")
        return await engine.handle(request.method, request.path, request.headers, request.content)

    backend = BACKENDS[kind]("http://h", http_transport=in_process(Handler(gateway)), sleep=waits, timeout_s=0.2)
    info = await backend.connect()
    assert (info.version, info.weight_version) == (None, None)
    connected.append(True)
    with pytest.raises(EngineTimeoutError):
        await generate(backend, request_of())
    assert (waits.seconds, caplog.text) == ([], "")


# A server behind a Unix socket, as with vLLM's `--uds`.


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


# Connecting takes few round trips and repeats every measurement.


STEPS = 200
"""Steps of the event loop that a request takes; what is sent together takes a few to get on its way."""


class Distant(InProcessTransport):
    """A server that is so many steps away, and counts how many requests waited for each other.

    Attributes:
        rounds: The round of each request: one more than the highest of those that were answered when it was sent.
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.rounds: list[int] = []
        self._answered = 0

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        number = self._answered + 1
        self.rounds.append(number)
        for _ in range(STEPS):
            await asyncio.sleep(0)
        reply = await super().send(method, url, headers, body)
        self._answered = max(self._answered, number)
        return reply


@pytest.mark.parametrize(("kind", "rounds"), [("vllm", 6), ("vllm-completions", 6), ("sglang", 5)])
def test_connecting_takes_few_round_trips(kind: Kind, rounds: int) -> None:
    size = len(tokenizer())
    there = Distant(engine_of(kind, HashPolicy(size, eos_ids=[EOS]), vocab_size=size))
    backend = backend_of(there.engine, http_transport=lambda: there)
    policy = run_blocking(Policy.connect_async(backend=backend, tokenizer=tokenizer()))
    assert policy.info.processed_logprobs is not None
    print(f"{kind}: {len(there.rounds)} requests in {max(there.rounds)} rounds")
    assert max(there.rounds) == rounds


@pytest.mark.parametrize("kind", WIRES)
def test_a_server_restarted_with_other_options_is_measured_again(kind: Kind) -> None:
    size = len(tokenizer())
    raw, processed = (
        engine_of(kind, HashPolicy(size, eos_ids=[EOS]), vocab_size=size, raw_logprobs=raw) for raw in (True, False)
    )
    there = InProcessTransport(raw)
    backend = backend_of(raw, http_transport=lambda: there)
    for engine, processes in ((raw, False), (processed, True), (raw, False)):
        there.engine = engine
        policy = run_blocking(Policy.connect_async(backend=backend, tokenizer=tokenizer()))
        assert policy.info.processed_logprobs is processes
