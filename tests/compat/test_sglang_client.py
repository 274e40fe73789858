"""`SGLangClient` over a scripted server: requests, retries and errors."""

from __future__ import annotations

import asyncio
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest

from support.names import client_of
from support.scripted import Says, engine_of, ids_of, tokenizer
from tito_compat.sglang_client import slime_connections
from tito_conformance.testing import Fault, ScriptedServer, always, first
from tito_core.backend.errors import BackendError, ContextLengthError, EngineConnectionError, ThrottledError
from tito_sglang import (
    SGLangClient,
    SGLangClientError,
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangHTTPError,
    SGLangThrottledError,
    get_client,
    get_client_from_slime_args,
    get_tokenizer,
)

STATUSES: list[tuple[int, type[BackendError], type[BackendError]]] = [
    (400, SGLangHTTPError, BackendError),
    (401, SGLangHTTPError, BackendError),
    (429, SGLangThrottledError, ThrottledError),
    (500, SGLangHTTPError, BackendError),
    (503, SGLangThrottledError, ThrottledError),
]


@pytest.mark.parametrize(("status", "theirs", "ours"), STATUSES)
async def test_errors_have_the_types_of_strands_sglang_and_ours(
    status: int, theirs: type[BackendError], ours: type[BackendError]
) -> None:
    fault = Fault(status=status)
    client = client_of(engine_of("sglang", Says(), fault=always(fault)), max_retries=1, retry_delay=0.0)
    with pytest.raises(theirs) as caught:
        await client.generate(ids_of("Hello"), sampling_params={"max_new_tokens": 1})
    assert isinstance(caught.value, ours)
    assert isinstance(caught.value, SGLangClientError)
    assert caught.value.status == status
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), copied.status, str(copied)) == (type(caught.value), status, str(caught.value))


async def test_a_prompt_that_is_too_long_is_not_retried() -> None:
    engine = engine_of("sglang", Says(), max_model_len=16)
    client = client_of(engine, max_retries=5, retry_delay=0.0)
    with pytest.raises(SGLangContextLengthError) as caught:
        await client.generate(list(range(5, 40)), sampling_params={"max_new_tokens": 1})
    assert isinstance(caught.value, ContextLengthError)
    assert isinstance(caught.value, SGLangHTTPError)
    assert len(engine.exchanges) == 1


async def test_waits_between_tries_are_at_most_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    client = client_of(engine_of("sglang", Says("Five."), fault=first(3, Fault(status=500))), retry_delay=0.01)
    await client.generate(ids_of("Hello"), sampling_params={"max_new_tokens": 9})
    assert waited.count(0.01) == 3


async def test_no_server_is_an_error_of_strands_sglang() -> None:
    unreachable = SGLangClient("http://127.0.0.1:9", max_retries=0)
    with pytest.raises(SGLangConnectionError) as caught:
        await unreachable.generate([1])
    assert isinstance(caught.value, EngineConnectionError)
    assert not await unreachable.health()
    assert await unreachable.model_info() is None
    assert await unreachable.max_model_len() is None
    assert not await unreachable.is_multimodal()


async def test_a_client_returns_facts_about_its_server() -> None:
    async with client_of(engine_of("sglang", Says("Five."))) as client:
        assert await client.health()
        assert await client.max_model_len() == await client.max_model_len() == 4096
        assert "model_path" in (await client.model_info() or {})
        assert not await client.is_multimodal()
    assert await client.health()  # opens a new connection


async def test_a_cancelled_generate_is_aborted_on_the_server() -> None:
    engine = engine_of("sglang", Says("Five."), latency=30.0)
    task = asyncio.ensure_future(client_of(engine).generate(ids_of("Hello"), sampling_params={"max_new_tokens": 9}))
    while not engine.requests:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert any(exchange.path == "/abort_request" for exchange in engine.exchanges)


def test_clients_and_tokenizers_are_shared_and_slimes_arguments_read() -> None:
    assert get_client("http://host:1") is get_client("http://host:1")
    assert get_client("http://host:1") is not get_client("http://host:2")
    args: Any = SimpleNamespace(
        sglang_router_ip="10.0.0.1",
        sglang_router_port=9000,
        sglang_server_concurrency=256,
        rollout_num_gpus=8,
        rollout_num_gpus_per_engine=2,
    )
    client = get_client_from_slime_args(args)
    assert client is get_client_from_slime_args(args)
    assert (client.base_url, slime_connections(args)) == ("http://10.0.0.1:9000", 1024)
    assert SGLangClient.from_slime_args(args, timeout=None).base_url == client.base_url


def test_a_tokenizer_is_loaded_once(tmp_path: Any) -> None:
    tokenizer().save_pretrained(tmp_path)
    assert get_tokenizer(str(tmp_path)) is get_tokenizer(str(tmp_path))


async def test_max_connections_bounds_the_open_connections() -> None:
    """Two requests of 0.1 s on one connection take at least 0.2 s."""
    with ScriptedServer(engine_of("sglang", Says("Five."), latency=0.1)) as server:
        async with SGLangClient(server.base_url, max_connections=1) as client:
            began = time.monotonic()
            requests = [client.generate(ids_of("Hello"), sampling_params={"max_new_tokens": 9}) for _ in range(2)]
            await asyncio.gather(*requests)
            assert time.monotonic() - began >= 0.2
