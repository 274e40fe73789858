"""One engine over a socket and in process: faults, aborts, disconnects, pauses and streams are the same."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import aiohttp
import numpy as np
import pytest

from support.client import Client, Response, lines
from tito_conformance.testing import (
    THROTTLED,
    UNAVAILABLE,
    Completion,
    Fault,
    HashPolicy,
    InProcessTransport,
    Replay,
    ScriptedEngine,
    ScriptedServer,
    WireResponse,
    always,
    at,
    every,
    first,
    from_function,
    scripted_engine,
    scripted_server,
)
from tito_core.backend import create_backend
from tito_core.backend.generate import generate, score
from tito_core.backend.http.client import ConnectionPool
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import measure

pytestmark = pytest.mark.suite

Kind = Literal["vllm", "sglang"]
Connect = Callable[[ScriptedEngine], AbstractAsyncContextManager[Client]]
PATHS = {"vllm": "/v1/completions", "sglang": "/generate"}
TEN = from_function(lambda prompt: [5, 6, 7, 8, 9, 10, 11, 12, 13, 2])


@asynccontextmanager
async def over_socket(engine: ScriptedEngine) -> AsyncIterator[Client]:
    async with ScriptedServer(engine) as server:
        pool = ConnectionPool()
        yield Client(pool, server.base_url)
        await pool.aclose()


@asynccontextmanager
async def in_process(engine: ScriptedEngine) -> AsyncIterator[Client]:
    yield Client(InProcessTransport(engine), "http://scripted")


@pytest.fixture(params=[over_socket, in_process], ids=["socket", "in-process"])
def connect(request: pytest.FixtureRequest) -> Connect:
    found: Connect = request.param
    return found


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def made(kind: Kind, script: Any = TEN, **settings: Any) -> ScriptedEngine:
    return scripted_engine(kind, script, eos_ids=[2], **settings)


def fields(kind: Kind, **extra: Any) -> dict[str, Any]:
    if kind == "vllm":
        return {
            "model": "scripted",
            "prompt": [1, 3],
            "max_tokens": 10,
            "logprobs": 0,
            "return_token_ids": True,
            **extra,
        }
    return {"input_ids": [1, 3], "sampling_params": {"max_new_tokens": 10}, "return_logprob": True, **extra}


def output_ids(kind: Kind, response: Response) -> list[int]:
    value = response.json()
    found: list[int] = value["choices"][0]["token_ids"] if kind == "vllm" else value["output_ids"]
    return found


def finish(kind: Kind, response: Response) -> str:
    value = response.json()
    return str(value["choices"][0]["finish_reason"] if kind == "vllm" else value["meta_info"]["finish_reason"]["type"])


async def abort(kind: Kind, client: Client, request_id: str) -> None:
    if kind == "vllm":
        answer = await client.post("/inference/v1/abort_requests", json={"request_ids": [request_id]})
    else:
        answer = await client.post("/abort_request", json={"rid": request_id})
    assert (answer.status, answer.content) == (200, b"")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def test_status_faults_and_policies(kind: Kind, connect: Connect) -> None:
    engine = made(kind, fault=at({0: THROTTLED, 1: UNAVAILABLE, 2: Fault(status=307, headers={"location": "/x"})}))
    async with connect(engine) as client:
        answers = [await client.post(PATHS[kind], json=fields(kind)) for _ in range(4)]
    assert [answer.status for answer in answers] == [429, 503, 307, 200]
    assert answers[0].headers["retry-after"] == "0"
    assert answers[0].json() == {"error": "busy"}
    assert answers[1].content == b"no upstream"
    assert [request.number for request in engine.requests] == [0, 1, 2, 3]
    assert engine.running == 0
    calls = [every(2, UNAVAILABLE), first(1, UNAVAILABLE), always(UNAVAILABLE)]
    decided = [[policy(n, engine.requests[0]) is not None for n in range(3)] for policy in calls]
    assert decided == [[True, False, True], [True, False, False], [True, True, True]]


@pytest.mark.parametrize(
    "fault", [Fault(reset_after=0), Fault(close_after=0), Fault(reset_after=20), Fault(close_after=20)]
)
async def test_cut_connections(kind: Kind, connect: Connect, fault: Fault) -> None:
    script = Replay([[5, 2], [6, 2]])
    engine = made(kind, script, fault=first(1, fault))
    async with connect(engine) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.post(PATHS[kind], json=fields(kind))
        assert script.remaining == (2 if fault.unanswered else 1)
        assert (await client.post(PATHS[kind], json=fields(kind))).status == 200
    assert engine.running == 0


async def test_a_cut_body_arrives_up_to_the_cut(kind: Kind, connect: Connect) -> None:
    async with (
        connect(made(kind, fault=always(Fault(close_after=20)))) as client,
        client.stream("POST", PATHS[kind], json=fields(kind)) as response,
    ):
        assert response.status == 200
        pieces = response.pieces()
        assert len(await anext(pieces)) == 20
        with pytest.raises(aiohttp.ClientPayloadError):
            await anext(pieces)


async def test_spoiled_bodies(kind: Kind, connect: Connect) -> None:
    html = Fault(body=b"<html>502</html>", content_type="text/html")
    engine = made(kind, fault=at({0: html, 1: Fault(content_type="text/plain"), 2: Fault(drip=(50, 0.001))}))
    async with connect(engine) as client:
        answers = [await client.post(PATHS[kind], json=fields(kind)) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert answers[0].text == "<html>502</html>"
    assert [answer.headers["content-type"] for answer in answers] == ["text/html", "text/plain", "application/json"]
    assert output_ids(kind, answers[1]) == output_ids(kind, answers[2]) == [5, 6, 7, 8, 9, 10, 11, 12, 13, 2]


async def test_planted_defects(kind: Kind, connect: Connect) -> None:
    def shift(answer: Any) -> None:
        if kind == "vllm":
            table = answer["choices"][0]["logprobs"]
            table["token_logprobs"] = [float("nan"), *table["token_logprobs"][:-1]]
        else:
            entries = answer["meta_info"]["output_token_logprobs"]
            for entry, value in zip(entries, [float("nan"), *(e[0] for e in entries[:-1])], strict=True):
                entry[0] = value

    async with connect(made(kind, fault=always(Fault(edit=shift)))) as client:
        answer = await client.post(PATHS[kind], json=fields(kind))
    assert b"NaN" in answer.content
    assert len(output_ids(kind, answer)) == 10


async def test_edited_streams(kind: Kind, connect: Connect) -> None:
    engine = made(kind, fault=always(Fault(edit=lambda events: events[::-1])), latency=0.01)
    async with connect(engine) as client:
        answer = await client.post(PATHS[kind], json=fields(kind, stream=True))
    events = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n")[:-2]]
    first_event = events[0]["choices"][0]["token_ids"] if kind == "vllm" else events[0]["output_ids"][-1:]
    assert first_event == [2]
    assert engine.running == 0


async def test_abort_during_a_hang_gives_the_tokens_so_far(kind: Kind, connect: Connect) -> None:
    engine = made(kind, fault=first(1, Fault(hang=True, emitted=3)))
    extra: dict[str, Any] = {"request_id": "r7"} if kind == "vllm" else {"rid": "r7"}
    server_id = "cmpl-r7-0" if kind == "vllm" else "r7"
    async with connect(engine) as client:
        pending = asyncio.create_task(client.post(PATHS[kind], json=fields(kind, **extra)))
        await until(lambda: engine.running == 1)
        assert engine.requests[0].request_id == "r7"
        await abort(kind, client, "nobody")
        assert engine.aborted == []
        await abort(kind, client, server_id)
        answer = await pending
    assert (finish(kind, answer), output_ids(kind, answer)) == ("abort", [5, 6, 7])
    assert (engine.aborted, engine.disconnected, engine.running) == ([server_id], [], 0)


async def test_latency_can_be_aborted_too(kind: Kind, connect: Connect) -> None:
    engine = made(kind, latency=lambda request: 20.0)
    extra: dict[str, Any] = {} if kind == "vllm" else {"rid": "r8"}
    async with connect(engine) as client:
        headers = {"X-Request-Id": "r8"}
        pending = asyncio.create_task(client.post(PATHS[kind], json=fields(kind, **extra), headers=headers))
        await until(lambda: engine.running == 1)
        await abort(kind, client, engine.requests[0].server_id)
        answer = await pending
    assert (finish(kind, answer), output_ids(kind, answer)) == ("abort", [])


@pytest.mark.parametrize("how", [Fault(hang=True), Fault(delay=30.0)], ids=["hang", "delay"])
async def test_a_disconnect_is_noticed(kind: Kind, connect: Connect, how: Fault) -> None:
    engine = made(kind, fault=always(how))
    async with connect(engine) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post(PATHS[kind], json=fields(kind)), 0.1)
        await until(lambda: engine.running == 0)
        pending = asyncio.create_task(client.post(PATHS[kind], json=fields(kind)))
        await until(lambda: engine.running == 1)
        pending.cancel()
        await until(lambda: engine.running == 0)
    assert engine.disconnected == [request.server_id for request in engine.requests]
    assert (len(engine.disconnected), engine.peak) == (2, 1)


async def test_a_stream_comes_token_by_token_and_an_abort_ends_it(kind: Kind, connect: Connect) -> None:
    engine = made(kind, latency=0.5)
    async with connect(engine) as client:
        events = []
        async with client.stream("POST", PATHS[kind], json=fields(kind, stream=True)) as response:
            async for line in lines(response):
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 3:
                    await abort(kind, client, engine.requests[0].server_id)
    last = events[-1]
    reason = last["choices"][0]["finish_reason"] if kind == "vllm" else last["meta_info"]["finish_reason"]["type"]
    assert reason == "abort"
    parts = [event["choices"][0]["token_ids"] for event in events] if kind == "vllm" else [last["output_ids"]]
    output = [i for ids in parts for i in ids]
    assert output == list(range(5, 5 + len(output)))
    assert 4 <= len(output) < 10
    assert engine.running == 0


async def test_a_disconnect_from_a_stream_is_noticed(kind: Kind, connect: Connect) -> None:
    engine = made(kind, latency=20.0)
    async with connect(engine) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post(PATHS[kind], json=fields(kind, stream=True)), 0.1)
        await until(lambda: engine.running == 0)
    assert engine.disconnected == [engine.requests[0].server_id]


async def test_a_paused_server_makes_requests_wait(kind: Kind, connect: Connect) -> None:
    engine = made(kind)
    pause, resume = ("/pause?mode=keep", "/resume") if kind == "vllm" else ("/pause_generation", "/continue_generation")
    async with connect(engine) as client:
        assert (await client.post(pause, json={"mode": "keep" if kind == "vllm" else "in_place"})).status == 200
        pending = asyncio.create_task(client.post(PATHS[kind], json=fields(kind)))
        await until(lambda: engine.running == 1)
        await asyncio.sleep(0.03)
        assert not pending.done()
        assert (await client.get("/health")).status == 200
        assert (await client.post(resume)).status == 200
        assert len(output_ids(kind, await pending)) == 10


async def test_new_weights_in_mid_generation_leave_two_spans(kind: Kind, connect: Connect) -> None:
    engine = made(kind, latency=1.0)
    path = "/inference/v1/generate" if kind == "vllm" else "/generate"
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 10}} if kind == "vllm" else fields(kind)
    async with connect(engine) as client:
        pending = asyncio.create_task(client.post(path, json=body))
        await until(lambda: engine.running == 1 and engine._active[0].began and engine._active[0].emitted() > 0)
        await client.post("/update_weight_version", json={"new_version": "v2", "abort_all_requests": False})
        value = (await pending).json()
    spans = value["choices"][0]["weight_versions"] if kind == "vllm" else value["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "v2"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 10)
    assert 0 < spans[1]["start"] < 10


async def test_a_stream_reports_version_spans_at_its_end(kind: Kind, connect: Connect) -> None:
    engine = made(kind, latency=0.6)
    path = "/inference/v1/generate" if kind == "vllm" else "/generate"
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 10}} if kind == "vllm" else fields(kind)
    events: list[Any] = []
    async with connect(engine) as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        async for line in lines(response):
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 4 and engine.state.weight_version == "default":
                await client.post("/update_weight_version", json={"new_version": "v2", "abort_all_requests": False})
    if kind == "vllm":
        versions = [event["choices"][0]["weight_versions"] for event in events if event["choices"]]
    else:
        versions = [event["meta_info"].get("weight_versions") for event in events]
    *before, spans = versions
    assert not any(before)
    assert [span["version"] for span in spans] == ["default", "v2"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 10)
    assert 4 <= spans[1]["start"] <= 5, "tokens before the update are the old weights'"


async def test_concurrency_is_limited(kind: Kind, connect: Connect) -> None:
    engine = made(kind, latency=0.3, max_running=1, max_queued=1)
    async with connect(engine) as client:
        pending = [asyncio.create_task(client.post(PATHS[kind], json=fields(kind))) for _ in range(2)]
        await until(lambda: engine.running == 2)
        third = await client.post(PATHS[kind], json=fields(kind))
        statuses = {(await one).status for one in pending}
    assert statuses == {200}
    assert third.status == (200 if kind == "vllm" else 503)
    if kind == "sglang":
        full = {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}
        assert third.json() == full


async def test_the_api_key(kind: Kind, connect: Connect) -> None:
    async with connect(made(kind, api_key="secret")) as client:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer no"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
        ):
            assert (await client.post(PATHS[kind], json=fields(kind), headers=headers)).status == status
        assert (await client.get("/health")).status == 200


async def test_an_id_outside_the_vocabulary(connect: Connect) -> None:
    async with connect(made("vllm")) as client:
        answer = await client.post("/v1/completions", json=fields("vllm", prompt=[1, 1000]))
        assert answer.json()["error"]["message"] == "Token id 1000 is out of vocabulary"
    engine = made("sglang", fault=at({0: Fault(hang=True)}))
    async with connect(engine) as client:
        waiting = asyncio.create_task(client.post("/generate", json=fields("sglang")))
        await until(lambda: engine.running == 1)
        with pytest.raises(aiohttp.ClientError):
            await client.post("/generate", json=fields("sglang", input_ids=[1, 1000]))
        assert engine.state.dead
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/health")
        with pytest.raises(aiohttp.ClientError):
            await waiting


async def test_big_bodies_and_many_at_once(kind: Kind, connect: Connect) -> None:
    engine = made(kind, latency=0.01, max_model_len=400_000)
    prompt = "prompt" if kind == "vllm" else "input_ids"
    async with connect(engine) as client:
        assert (await client.post(PATHS[kind], json=fields(kind, **{prompt: [999] * 300_000}))).status == 200
        answers = await asyncio.gather(*(client.post(PATHS[kind], json=fields(kind)) for _ in range(50)))
    assert {len(output_ids(kind, answer)) for answer in answers} == {10}
    assert engine.peak > 1


async def test_a_record_of_every_exchange(kind: Kind, connect: Connect) -> None:
    engine = made(kind)
    async with connect(engine) as client:
        await client.get("/health")
        answer = await client.post(PATHS[kind], json=fields(kind))
        await client.get("/nowhere")
    assert [(e.method, e.path, e.response.status) for e in engine.exchanges] == [
        ("GET", "/health", 200),
        ("POST", PATHS[kind], 200),
        ("GET", "/nowhere", 404),
    ]
    exchange = engine.exchanges[1]
    assert json.loads(exchange.body) == fields(kind)
    assert exchange.response.content == answer.content
    assert exchange.answers[0].output_ids == (5, 6, 7, 8, 9, 10, 11, 12, 13, 2)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", b"", 200),
        ("POST", "/health", b"", 405),
        ("GET", "/update_weight_version", b"", 405),
        ("PUT", "/update_weight_version", b'{"new_version": "v2"}', 405),
        ("POST", "/nowhere", b"", 404),
        ("POST", "/update_weight_version", b'{"new_version": "v2"}', 200),
        ("POST", "/update_weight_version", b"{", None),
        ("POST", "/update_weight_version", b"[]", None),
    ],
)
async def test_other_paths_answer_by_method_and_body(
    kind: Kind, method: str, path: str, body: bytes, status: int | None
) -> None:
    engine = made(kind)
    got = (await engine.handle(method, path, {}, body)).status
    assert got in (400, 422) if status is None else got == status
    assert engine.state.weight_version == ("v2" if method == "POST" and status == 200 else "default")


async def test_vllm_reads_the_pause_mode_from_the_query() -> None:
    engine = made("vllm")
    assert (await engine.handle("POST", "/pause?mode=never", {}, b"")).status == 400
    assert not engine.state.paused
    assert (await engine.handle("POST", "/pause?mode=keep", {}, b'{"mode": "never"}')).status == 200
    assert engine.state.paused


async def test_nothing_is_recorded_without_record(kind: Kind) -> None:
    engine = made(kind, record=False)
    async with in_process(engine) as client:
        assert (await client.post(PATHS[kind], json=fields(kind))).status == 200
    assert (engine.requests, engine.exchanges) == ([], [])


def posted(url: str, body: Any, timeout: float = 60.0) -> int:
    pending = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(pending, timeout=timeout) as answer:
        return int(answer.status)


def test_in_a_thread_for_synchronous_code(kind: Kind) -> None:
    threads = threading.active_count()
    with scripted_server(kind, HashPolicy(1000, eos_ids=[2]), eos_ids=[2], fault=at({1: Fault(hang=True)})) as server:
        assert posted(server.base_url + PATHS[kind], fields(kind)) == 200
        with pytest.raises(TimeoutError):
            posted(server.base_url + PATHS[kind], fields(kind), timeout=0.05)
        assert len(server.engine.requests) == 2
    assert threading.active_count() == threads
    with pytest.raises(URLError, match="refused"):
        posted(f"{server.base_url}/health", {})


def test_usage_errors() -> None:
    with pytest.raises(ValueError, match=r"Unknown wire 'tgi'\. Installed wires: sglang, vllm"):
        scripted_engine("tgi", TEN)
    with pytest.raises(RuntimeError, match="Start it with `with`"):
        _ = scripted_server("vllm", TEN).base_url


async def test_other_endpoints_can_be_overridden(kind: Kind, connect: Connect) -> None:
    engine = made(kind)
    engine.overrides = {
        "/v1/models": WireResponse(200, {"content-type": "text/html"}, b"<html>hello</html>"),
        "/health": WireResponse(500, reset_after=0),
    }
    async with connect(engine) as client:
        assert (await client.get("/v1/models?x=1")).text == "<html>hello</html>"
        with pytest.raises(aiohttp.ClientOSError):
            await client.get("/health")


@pytest.mark.parametrize(
    ("script", "raw"),
    [
        (lambda: Replay([[5, 2]]), True),
        (lambda: from_function(lambda prompt: [5, 2]), True),
        (lambda: lambda request: Completion([5, 2]), True),
        (lambda: HashPolicy(1000, eos_ids=[2]), False),
    ],
    ids=["Replay", "from_function", "function", "HashPolicy"],
)
async def test_answers_are_for_turns_and_a_distribution_is_measured(kind: Kind, script: Any, raw: bool) -> None:
    """Connecting and scoring use up no answer, and need none as long as a measurement; what a policy samples counts."""
    engine = scripted_engine(kind, script(), eos_ids=[2], raw_logprobs=False)
    backend = create_backend(kind, "http://scripted", http_transport=lambda: InProcessTransport(engine))
    prompt = np.arange(5, 25, dtype=np.int32)
    info = await measure(backend, await backend.connect(), prompt)
    assert info.processed_logprobs is not raw
    assert len(await score(backend, prompt)) > 0
    answer = await generate(backend, TokenRequest(prompt, SamplingParams(max_new_tokens=8), "turn"))
    assert raw == (answer.output_ids.tolist() == [5, 2])
    await backend.aclose()
