"""Requests that a real server refuses raise typed errors, and the server keeps running."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from strands.types.exceptions import ContextWindowOverflowException

import tito_engines as engines
from support.scripted import tokenizer
from tito_core import Policy
from tito_core.backend import (
    AuthenticationError,
    BadRequestError,
    ContextLengthError,
    SamplingParams,
    ThrottledError,
    TokenRequest,
    create_backend,
)
from tito_core.backend.generate import generate
from tito_core.backend.http.backend import HttpBackend

pytestmark = pytest.mark.engine
KEY = "a-key-of-this-test"
BUSY = {"vllm": [], "sglang": ["--max-running-requests", "1", "--max-queued-requests", "1"]}
"""Only SGLang: vLLM's queue has no bound."""


@dataclass(frozen=True)
class Locked:
    kind: str
    url: str

    def connect(self, key: str | None) -> Policy:
        return Policy.connect(
            backend=self.kind, base_url=self.url, tokenizer=tokenizer("smollm2"), api_key=key, timeout_s=120
        )


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def locked(request: pytest.FixtureRequest) -> Iterator[Locked]:
    arguments = ["--api-key", KEY, *BUSY[request.param]]
    with engines.running_sync(request.param, model="smollm2", server_args=arguments) as url:
        yield Locked(request.param, url)


def request_of(length: int, **sampling: object) -> TokenRequest:
    ids = np.full(length, 1000, np.int32)
    return TokenRequest(ids, SamplingParams.model_validate(sampling), uuid.uuid4().hex)


def unclamped(policy: Policy) -> HttpBackend:
    """Return the policy's backend without the server's context length."""
    backend = policy.backend
    assert isinstance(backend, HttpBackend)
    backend._info = replace(policy.info, max_model_len=None)
    return backend


async def expect_alive(locked: Locked) -> None:
    policy = await asyncio.to_thread(locked.connect, KEY)
    response = await generate(policy.backend, request_of(8, max_new_tokens=4, temperature=0.0))
    assert len(response.output_ids) == len(response.logprobs) >= 1
    await policy.backend.aclose()


async def test_a_wrong_or_missing_key_fails_before_sampling(locked: Locked) -> None:
    for key in ("another-key", None):
        with pytest.raises(AuthenticationError) as refused:
            await asyncio.to_thread(locked.connect, key)
        assert "another-key" not in str(refused.value)
        assert KEY not in str(refused.value)
    await expect_alive(locked)


async def test_a_prompt_that_is_too_long_is_an_overflow_in_the_client_and_on_the_server(locked: Locked) -> None:
    policy = await asyncio.to_thread(locked.connect, KEY)
    length = policy.info.max_model_len
    assert length is not None
    model = policy.model(sampling={"max_new_tokens": 4})
    with pytest.raises(ContextWindowOverflowException):
        async for _ in model.stream([{"role": "user", "content": [{"text": "word " * length}]}]):
            pass
    assert len(model.ledger) == 0
    with pytest.raises(ContextLengthError) as refused:
        await generate(unclamped(policy), request_of(length + 100, max_new_tokens=4))
    assert refused.value.status == 400
    assert refused.value.body
    assert str(length + 100) in refused.value.body
    await policy.backend.aclose()
    await expect_alive(locked)


async def test_another_400_is_not_an_overflow_and_not_retried(locked: Locked) -> None:
    policy = await asyncio.to_thread(locked.connect, KEY)
    with pytest.raises(BadRequestError) as refused:
        await generate(policy.backend, request_of(8, max_new_tokens=4, grammar={"kind": "regex", "value": "("}))
    assert refused.value.status == 400
    assert refused.value.body
    await policy.backend.aclose()
    await expect_alive(locked)


async def test_a_full_queue_is_retried(locked: Locked) -> None:
    async def crowd(patience_s: float, tokens: int) -> list[object]:
        # Without a policy, whose own measurement at connect needs more than one place in the queue.
        backend = create_backend(locked.kind, locked.url, api_key=KEY, timeout_s=120, patience_s=patience_s)
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        sent = (generate(backend, request_of(8 + number, **sampling)) for number in range(8))
        ended = list(await asyncio.gather(*sent, return_exceptions=True))
        await backend.aclose()
        return [error for error in ended if isinstance(error, BaseException)]

    lost = await crowd(patience_s=0, tokens=96)
    if locked.kind == "vllm":
        assert lost == []
    else:
        assert lost
        assert all(isinstance(error, ThrottledError) and error.status == 503 and error.body for error in lost), lost
    assert await crowd(patience_s=60, tokens=24) == []
