"""New weights on a real server: the next rollout is sampled from them and records their version."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tito_engines as engines
from support.real import policy_at
from tito_conformance.agents import collect_answer
from tito_core.backend import (
    EngineAdmin,
    EngineConnectionError,
    GenerationAbortedError,
    SamplingParams,
    ServerError,
    TokenRequest,
    WeightsNotLoadedError,
    create_backend,
    generate_resuming,
)
from tito_core.backend.generate import generate, score
from tito_core.ledger.turn import Finish, VersionSpan
from tito_engines import install, models

pytestmark = pytest.mark.engine
PROMPT = np.arange(1000, 1064, dtype=np.int32)
"""Longer than a page of the KV cache, so that a stale page would be reused."""
TRIES = 5
"""On a CPU a busy vLLM may accept a call seconds late, so that an answer starts or ends before or after the pause, and
nothing is aborted."""


@dataclass(frozen=True)
class Server:
    kind: str
    url: str
    weights: Path


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    weights = models.ensure("qwen3-tiny", install.ensure(engines.find(request.param)).python)
    with engines.running_sync(request.param, model="qwen3-tiny", dev_mode=True) as url:
        yield Server(request.param, url, weights)


def other_weights(weights: Path, folder: Path) -> Path:
    """The same model with every weight multiplied by 0.9."""
    shutil.copytree(weights, folder)
    (file,) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    assert {tensor["dtype"] for name, tensor in json.loads(raw[8:begin]).items() if name != "__metadata__"} == {"F32"}
    file.write_bytes(raw[:begin] + (np.frombuffer(raw[begin:], "<f4") * np.float32(0.9)).tobytes())
    return folder


def request_of(tokens: int) -> TokenRequest:
    return TokenRequest(PROMPT, SamplingParams(max_new_tokens=tokens, ignore_eos=True), uuid.uuid4().hex)


async def test_weights_change_between_and_within_generations(server: Server, tmp_path: Path) -> None:
    backend: Any = create_backend(server.kind, server.url, timeout_s=300)
    assert isinstance(backend, EngineAdmin)
    first = await generate(backend, request_of(32))
    assert first.versions == (VersionSpan(0, 32, "default"),)
    sequence = [*PROMPT.tolist(), *first.output_ids.tolist()]
    old = await score(backend, sequence)

    await backend.load_weights(str(other_weights(server.weights, tmp_path / "new")), "step-1")
    assert await backend.weight_version() == "step-1"
    assert np.nanmax(np.abs(await score(backend, sequence) - old)) > 0.1, "the new weights say something else"
    after = await generate(backend, request_of(32))
    assert after.versions == (VersionSpan(0, 32, "step-1"),)
    scored = (await score(backend, [*PROMPT.tolist(), *after.output_ids.tolist()]))[len(PROMPT) :]
    assert np.max(np.abs(scored - after.logprobs)) < 1e-4, "no key or value of the older weights was used again"

    for number in range(2, 2 + TRIES):
        running = asyncio.create_task(generate(backend, request_of(1500)))
        await asyncio.sleep(2.0)
        await backend.load_weights(str(server.weights), f"step-{number}")
        spans = (await running).versions
        if len(spans) > 1:
            break
    assert [span.version for span in spans] == [f"step-{number - 1}", f"step-{number}"]
    assert (spans[0].start, spans[0].stop, spans[1].stop) == (0, spans[1].start, 1500)


async def test_a_rollout_goes_on_after_new_weights_and_a_long_step(server: Server) -> None:
    """After 15 idle seconds the server is compared with that of connect, and SGLang has renamed its model."""
    policy = await policy_at(server.kind, server.url, "qwen3-tiny")
    model = policy.model(sampling={"max_new_tokens": 4})
    for version in ("one", "two"):
        await policy.backend.load_weights(str(server.weights), version)  # type: ignore[attr-defined]
        policy.backend.http.interruptions += 1  # type: ignore[attr-defined]
        await collect_answer(model.stream([{"role": "user", "content": [{"text": version}]}]))
    assert [span.version for turn in model.ledger for span in turn.draft.versions] == ["one", "two"]


async def test_an_aborted_generation_is_resumed_with_new_weights(server: Server, tmp_path: Path) -> None:
    backend: Any = create_backend(server.kind, server.url, timeout_s=300)
    new = str(other_weights(server.weights, tmp_path / "new"))
    for _ in range(TRIES):
        started_with = await backend.weight_version()
        request = request_of(1500)
        running = asyncio.create_task(generate_resuming(backend, request))
        await asyncio.sleep(2.0)
        await backend.pause("abort")
        await asyncio.sleep(1.0)
        waited = not running.done()
        await backend.load_weights(new, "resumed")
        response = await running
        assert (len(response.output_ids), response.finish) == (1500, Finish.LENGTH)
        if response.responses:
            break
        await backend.load_weights(str(server.weights), "restored")
    assert waited, "a paused server makes a rollout wait"
    first, second = response.responses
    assert (first.start, first.stop, second.stop) == (0, second.start, 1500)
    assert (first.request_id, second.request_id) == (request.request_id, f"{request.request_id}-part1")
    assert response.versions == (
        VersionSpan(0, first.stop, started_with),
        VersionSpan(second.start, 1500, "resumed"),
    )
    # The new weights scored the whole answer: only their own tokens agree.
    scored = (await score(backend, [*PROMPT.tolist(), *response.output_ids.tolist()]))[len(PROMPT) :]
    apart = np.abs(scored - response.logprobs)
    assert np.max(apart[second.start :]) < 1e-4
    assert np.max(apart[: first.stop]) > 0.1
    await backend.load_weights(str(server.weights), "restored")


async def test_an_aborted_generation_can_be_committed(server: Server) -> None:
    backend: Any = create_backend(server.kind, server.url, timeout_s=300)
    for _ in range(TRIES):
        running = asyncio.create_task(generate_resuming(backend, request_of(1500), "commit"))
        await asyncio.sleep(2.0)
        await backend.pause("abort")
        await asyncio.wait([running], timeout=5.0)  # a late request waits for the next step
        await backend.resume()
        with contextlib.suppress(GenerationAbortedError):  # it had not started
            response = await running
            if response.finish == Finish.ABORT:
                break
    assert response.finish == Finish.ABORT
    assert 0 < len(response.output_ids) == len(response.logprobs) < 1500
    scored = (await score(backend, [*PROMPT.tolist(), *response.output_ids.tolist()]))[len(PROMPT) :]
    assert np.max(np.abs(scored - response.logprobs)) < 1e-4


async def test_missing_weights_are_an_error_and_leave_the_server_paused(server: Server) -> None:
    backend: Any = create_backend(server.kind, server.url, timeout_s=300, patience_s=0)
    with pytest.raises(WeightsNotLoadedError, match="stays paused"):
        await backend.load_weights("/no/such/folder", "step-3")
    waiting = asyncio.create_task(generate(backend, request_of(4)))
    await asyncio.sleep(1.0)
    if server.kind == "vllm":  # its engine may die or hang up
        with contextlib.suppress(ServerError, EngineConnectionError):
            await backend.resume()
        with pytest.raises((ServerError, EngineConnectionError)):
            await waiting
    else:
        assert not waiting.done()
        await backend.resume()
        assert len((await waiting).output_ids) == 4
