"""Weights are loaded into a paused server and get a version before the server resumes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.backends import (
    BACKENDS,
    EOS,
    KINDS,
    Handler,
    Kind,
    Received,
    backend_of,
    engine_of,
    http_response,
    over_socket,
    request_of,
)
from tito_conformance.testing import Completion, HashPolicy, WireResponse
from tito_core.backend import EngineAdmin, WeightsNotLoadedError, generate_resuming
from tito_core.backend.errors import BadRequestError, UnsupportedByServerError
from tito_core.backend.generate import generate
from tito_core.backend.http.backend import HttpBackend
from tito_core.backend.http.client import HttpRequest
from tito_core.backend.protocol import Running
from tito_core.ledger.turn import VersionSpan
from tito_sglang.backend import SGLangBackend
from tito_vllm.backend import VLLMBackend

CALLS = {
    "vllm": ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume"],
    "sglang": ["/model_info", "/pause_generation", "/update_weights_from_disk", "/continue_generation"],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_are_loaded_between_pause_and_resume_and_report_their_version(kind: Kind) -> None:
    engine = engine_of(kind, lambda _: Completion([5, EOS]))
    backend = backend_of(engine)
    assert isinstance(backend, EngineAdmin)
    assert await backend.weight_version() == "default"
    before = len(engine.exchanges)
    await backend.load_weights("/weights/17", "step-17")
    assert [exchange.path for exchange in engine.exchanges[before:]] == CALLS[kind]
    assert await backend.weight_version() == "step-17"
    response = await generate(backend, request_of())
    assert response.versions == (VersionSpan(0, 2, "step-17"),)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_generation_waits_while_the_server_is_paused(kind: Kind) -> None:
    backend = backend_of(engine_of(kind, lambda _: Completion([5, EOS])))
    await backend.connect()
    await backend.pause()
    waiting = asyncio.create_task(generate(backend, request_of()))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await backend.resume()
    assert (await waiting).output_ids.tolist() == [5, EOS]


@pytest.mark.parametrize(("release", "running"), [("0.32.0", "keep"), ("0.32.0", "abort"), ("0.33.0", "abort")])
async def test_requests_outlast_a_pause_of_each_release_of_vllm(release: str, running: Running) -> None:
    """From 0.33 on a pause that aborts refuses new requests, and an answer that it cut is resumed after it."""
    waits = iter([3.0])
    engine = engine_of("vllm", HashPolicy(1000), release=release, latency=lambda _: next(waits, 0.0))
    backend: Any = backend_of(engine, sleep=asyncio.sleep)
    await backend.connect()
    task = asyncio.create_task(generate_resuming(backend, request_of(max_new_tokens=200, stop_token_ids=())))
    while not any(run.emitted() for run in engine._active):
        await asyncio.sleep(0.01)
    await backend.pause(running)
    later = asyncio.create_task(generate_resuming(backend, request_of(request_id="later", stop_token_ids=())))
    refused = release == "0.33.0" and running == "abort"
    while sum(e.response.status == 503 for e in engine.exchanges) < 2 if refused else len(engine.requests) < 2:
        await asyncio.sleep(0.01)
    await backend.load_weights("/w", "step-1", running=running)
    assert [span.version for span in (await task).versions] == ["default", "step-1"]
    assert [span.version for span in (await later).versions] == ["step-1"]


@pytest.mark.parametrize("kind", ["sglang"])
async def test_an_answer_goes_on_when_a_trainer_names_new_weights(kind: Kind) -> None:
    """SGLang's `/update_weight_version` aborts every request unless it is told not to."""
    waits = iter([6.0])
    engine = engine_of(kind, HashPolicy(1000), latency=lambda _: next(waits, 0.0))
    backend: Any = backend_of(engine, sleep=asyncio.sleep)
    await backend.connect()
    task = asyncio.create_task(generate_resuming(backend, request_of(max_new_tokens=200, stop_token_ids=())))
    while not any(run.emitted() for run in engine._active):
        await asyncio.sleep(0.01)
    await backend.http.send(HttpRequest("/update_weight_version", b'{"new_version": "step-1"}'))
    response = await task
    assert len(response.output_ids) == 200
    assert [span.version for span in response.versions] == ["default", "step-1"]
    assert len(response.responses) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_that_cannot_be_loaded_leave_the_server_paused(kind: Kind) -> None:
    paths: list[str] = []

    def handler(request: Received) -> WireResponse:
        paths.append(request.path.partition("?")[0])
        loads = paths[-1] in ("/collective_rpc", "/update_weights_from_disk")
        said = {"message": "no such folder"} if loads else {"weight_version": "step-17"}
        return http_response(400 if loads else 200, json=said)

    backend = BACKENDS[kind]("http://scripted", http_transport=over_socket(Handler(handler)))
    assert isinstance(backend, EngineAdmin)
    with pytest.raises(
        WeightsNotLoadedError, match=r"no such folder.*stays paused.*load_weights.*resume\(\)"
    ) as caught:
        await backend.load_weights("/no/such", "step-18")
    assert (caught.value.backend, caught.value.status) == (kind, 400)
    assert caught.value.body == '{"message":"no such folder"}'
    assert str(caught.value).startswith(
        f"{kind} could not load the weights in '/no/such' as 'step-18' ({kind} at http:"
    )
    assert paths == [path.partition("?")[0] for path in CALLS[kind][: {"vllm": 2, "sglang": 3}[kind]]]


async def test_weights_need_a_name() -> None:
    with pytest.raises(ValueError, match=r"version .*'step-17'"):
        await backend_of(engine_of("vllm")).load_weights("/weights", "")


BODIES = {
    "vllm": {
        "/pause?mode=abort": b"",
        "/collective_rpc": b'{"method":"reload_weights","kwargs":{"weights_path":"/w"}}',
        "/update_weight_version": b'{"new_version":"step-1"}',
        "/resume": b"",
    },
    "sglang": {
        "/pause_generation": b'{"mode":"abort"}',
        "/update_weights_from_disk": b'{"model_path":"/w","weight_version":"step-1","flush_cache":true}',
        "/continue_generation": b"{}",
    },
}


@pytest.mark.parametrize("images", [True, False, None])
async def test_features_of_images_from_old_weights_are_not_kept(images: bool | None) -> None:
    """SGLang may keep them, and no endpoint tells; nothing is sent unless the caller knows that it does not.

    None is a server behind a router that hides its properties.
    """
    sent: list[str] = []

    def handler(request: Received) -> WireResponse:
        sent.append(request.path)
        if images is None and request.path == "/model_info":
            return http_response(404)
        return http_response(200, json={"has_image_understanding": images, "weight_version": "a"})

    backend = SGLangBackend("http://scripted", http_transport=over_socket(Handler(handler)))
    if images is not False:
        with pytest.raises(UnsupportedByServerError, match=r"images_uncached=True.*SGLANG_VLM_CACHE_SIZE_MB=0"):
            await backend.load_weights("/w", "step-1")
        assert sent == ["/model_info"]
    await backend.load_weights("/w", "step-1", images_uncached=images is not False)
    assert sent[-3:] == CALLS["sglang"][1:]


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_to_each_engine_for_new_weights(kind: Kind) -> None:
    sent: dict[str, bytes] = {}

    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(404)
        sent[request.path] = request.content
        return http_response(200)

    backend = BACKENDS[kind]("http://scripted", http_transport=over_socket(Handler(handler)))
    assert isinstance(backend, EngineAdmin)
    await backend.load_weights("/w", "step-1", running="abort", images_uncached=True)
    assert sent == BODIES[kind]
    assert list(sent) == list(BODIES[kind])
    await backend.pause()
    kept = {"vllm": "/pause?mode=keep", "sglang": "/pause_generation"}[kind]
    assert sent[kept] == {"vllm": b"", "sglang": b'{"mode":"retract"}'}[kind]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_the_endpoint_has_no_weight_version(kind: Kind) -> None:
    nothing = Handler(lambda _: http_response(404))
    backend = BACKENDS[kind]("http://scripted", http_transport=over_socket(nothing))
    assert isinstance(backend, EngineAdmin)
    assert await backend.weight_version() is None


async def test_a_server_that_is_not_in_development_mode_is_told_so() -> None:
    nothing = Handler(lambda _: http_response(404, json={"detail": "Not Found"}))
    backend = VLLMBackend("http://scripted", http_transport=over_socket(nothing))
    for change in (backend.pause(), backend.resume(), backend.load_weights("/w", "step-1")):
        with pytest.raises(BadRequestError, match=r"404: Not Found\. Start the server with VLLM_SERVER_DEV_MODE=1"):
            await change


class Plain(HttpBackend):
    """A backend of a server that loads no adapters: the four requests that each one has."""

    name = "plain"
    discover = generate = score = abort_request = None  # type: ignore[assignment]


async def test_a_backend_without_a_request_for_adapters_refuses_them() -> None:
    with pytest.raises(BadRequestError, match="'plain' cannot load or unload the adapter 'a'"):
        await Plain("http://h").load_adapter("a", "/a")
