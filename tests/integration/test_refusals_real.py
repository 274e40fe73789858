"""What a real server refuses becomes a typed error with its own words, and it lives on."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from strands.types.exceptions import ContextWindowOverflowException

from strands_tito import engines
from support.scripted import tokenizer
from tito_core import Policy
from tito_core.backend import (
    AuthenticationError,
    BadRequestError,
    ContextLengthError,
    SamplingParams,
    ThrottledError,
    TokenRequest,
)
from tito_core.backend.checked import generate
from tito_core.backend.http.backend import HttpBackend

pytestmark = pytest.mark.engine
KEY = "a-key-of-this-test"
BUSY = {"vllm": [], "sglang": ["--max-running-requests", "1", "--max-queued-requests", "1"]}
"""vLLM queues without a bound."""


@dataclass(frozen=True)
class Locked:
    kind: str
    url: str

    def connect(self, key: str | None, **options: int) -> Policy:
        return Policy.connect(
            backend=self.kind, base_url=self.url, tokenizer=tokenizer("smollm2"), api_key=key, timeout_s=120, **options
        )


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def locked(request: pytest.FixtureRequest) -> Iterator[Locked]:
    arguments = ["--api-key", KEY, *BUSY[request.param]]
    with engines.running_sync(request.param, model="smollm2", server_args=arguments) as url:
        yield Locked(request.param, url)


def asked(length: int, **sampling: object) -> TokenRequest:
    ids = np.full(length, 1000, np.int32)
    return TokenRequest(ids, SamplingParams.model_validate(sampling), uuid.uuid4().hex)


def unclamped(policy: Policy) -> HttpBackend:
    """The policy's backend, which now knows nothing of the server's context."""
    backend = policy.backend
    assert isinstance(backend, HttpBackend)
    backend._info = replace(policy.info, max_model_len=None)
    return backend


async def lives(locked: Locked) -> None:
    policy = await asyncio.to_thread(locked.connect, KEY)
    response = await generate(policy.backend, asked(8, max_new_tokens=4, temperature=0.0))
    assert len(response.output_ids) == len(response.logprobs) >= 1
    await policy.backend.aclose()


async def test_a_wrong_key_or_none_is_told_before_anything_is_sampled(locked: Locked) -> None:
    for key in ("another-key", None):
        with pytest.raises(AuthenticationError) as refused:
            await asyncio.to_thread(locked.connect, key)
        assert "another-key" not in str(refused.value)
        assert KEY not in str(refused.value)
    await lives(locked)


async def test_what_does_not_fit_the_context_is_an_overflow_here_and_in_the_servers_words(locked: Locked) -> None:
    policy = await asyncio.to_thread(locked.connect, KEY)
    length = policy.info.max_model_len
    assert length is not None
    model = policy.model(sampling={"max_new_tokens": 4})
    with pytest.raises(ContextWindowOverflowException):
        async for _ in model.stream([{"role": "user", "content": [{"text": "word " * length}]}]):
            pass
    assert len(model.ledger) == 0
    with pytest.raises(ContextLengthError) as refused:
        await generate(unclamped(policy), asked(length + 100, max_new_tokens=4))
    assert refused.value.status == 400
    assert refused.value.body
    assert str(length + 100) in refused.value.body
    await policy.backend.aclose()
    await lives(locked)


async def test_another_400_is_no_overflow_and_is_not_sent_again(locked: Locked) -> None:
    policy = await asyncio.to_thread(locked.connect, KEY)
    with pytest.raises(BadRequestError) as refused:
        await generate(policy.backend, asked(8, max_new_tokens=4, grammar={"kind": "regex", "value": "("}))
    assert refused.value.status == 400
    assert refused.value.body
    await policy.backend.aclose()
    await lives(locked)


async def test_a_full_queue_is_throttling_and_passes_with_retries(locked: Locked) -> None:
    async def crowd(policy: Policy, tokens: int) -> list[object]:
        wanted = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        sent = (generate(policy.backend, asked(8 + number, **wanted)) for number in range(8))
        return list(await asyncio.gather(*sent, return_exceptions=True))

    once = await asyncio.to_thread(locked.connect, KEY, max_attempts=1)
    ended = await crowd(once, 96)
    await once.backend.aclose()
    lost = [error for error in ended if isinstance(error, BaseException)]
    if locked.kind == "vllm":
        assert lost == []
    else:
        assert lost
        assert all(isinstance(error, ThrottledError) and error.status == 503 and error.body for error in lost), lost
    again = await asyncio.to_thread(locked.connect, KEY, max_attempts=12)
    ended = await crowd(again, 24)
    await again.backend.aclose()
    assert [error for error in ended if isinstance(error, BaseException)] == []
