"""Streaming on real servers: the same ledger as without, and early text."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from strands import Agent

from support.histories import add
from support.real import Served
from support.scripted import tokenizer
from tito_core import Policy
from tito_core.backend import InvalidValueError, SamplingParams, TokenRequest
from tito_core.backend.generate import generate
from tito_core.ledger import Ledger, check_ledger
from tito_core.ledger.turn import Finish

pytestmark = pytest.mark.engine
QUESTION = "What is 25 + 17? Think of it in one sentence."
UUID = "00000000-0000-0000-0000-00000000000b"


@contextlib.contextmanager
def reached_by(policy: Policy, endpoints: tuple[str, ...] | None) -> Iterator[Policy]:
    """Let a policy's backend find only some of its server's endpoints, also where it looks again."""
    if endpoints is None:
        yield policy
        return
    backend: Any = policy.backend
    found = backend._info
    backend._info = replace(found, endpoints=endpoints)
    backend.discover = AsyncMock(return_value=backend._info)
    try:
        yield replace(policy, info=replace(policy.info, endpoints=endpoints, reports_versions=False))
    finally:
        backend._info = found
        del backend.discover


async def rollout(served: Served, *, stream: bool, endpoints: tuple[str, ...] | None = None) -> tuple[Any, ...]:
    """Run two greedy invocations; return the ledger, the messages and the number of early text deltas."""
    with reached_by(served.policy, endpoints) as policy:
        sampling = {"temperature": 0.0, "max_new_tokens": 60}
        model = policy.model(sampling=sampling, stream=stream, ledger=Ledger(UUID))
        agent = Agent(model=model, tools=[add], callback_handler=None)
        deltas = 0
        for question in (QUESTION, "Say it once more."):
            async for event in agent.stream_async(question, limits={"turns": 3}):
                deltas += "data" in event
    check_ledger(model.ledger)
    return model.ledger, [(m["role"], m["content"]) for m in agent.messages], deltas


def outputs(ledger: Ledger) -> list[list[int]]:
    return [turn.draft.output_ids.tolist() for turn in ledger]


async def test_an_answer_ends_at_a_regular_expression(served: Served) -> None:
    pattern = "[a-z]{5,}"
    for stream in (False, True):
        sampling = {"temperature": 0.0, "max_new_tokens": 60, "extra": {"stop_regex": pattern}}
        if served.kind == "vllm":
            with pytest.raises(InvalidValueError, match="extra for vllm 'stop_regex'"):
                served.policy.model(sampling=sampling, stream=stream)
            continue
        model = served.policy.model(sampling=sampling, stream=stream)
        agent = Agent(model=model, callback_handler=None)
        result = await agent.invoke_async("Tell me a story about the sea.")
        draft = model.ledger[0].draft
        assert (result.stop_reason, draft.finish, draft.stop) == ("stop_sequence", Finish.STOP, pattern)
        text = str(tokenizer().decode(draft.output_ids.tolist()))
        before = str(tokenizer().decode(draft.output_ids[:-1].tolist()))
        assert re.search(pattern, text)
        assert not re.search(pattern, before)
        check_ledger(model.ledger)


async def test_a_rollout_streams_to_the_same_ledger(served: Served) -> None:
    plain, messages, _ = await rollout(served, stream=False)
    ways: list[Any] = [None]
    if served.kind == "vllm":
        ways.append(("/v1/completions",))
    for endpoints in ways:
        watched, seen, deltas = await rollout(served, stream=True, endpoints=endpoints)
        assert outputs(watched) == outputs(plain)
        assert [message[0] for message in seen] == [message[0] for message in messages]
        assert seen == messages
        assert deltas > 1 + sum(role == "assistant" for role, _ in seen)  # all that one read brings is one
        for one, other in zip(watched, plain, strict=True):
            assert np.max(np.abs(one.draft.logprobs - other.draft.logprobs)) < 1e-3
            assert (one.draft.finish, one.draft.stop) == (other.draft.finish, other.draft.stop)
            assert one.draft.prompt_length == other.draft.prompt_length
            if endpoints is None:
                assert [tuple(span)[:2] for span in one.draft.engine.versions] == [
                    tuple(span)[:2] for span in other.draft.engine.versions
                ]


async def test_the_first_text_comes_long_before_the_last(served: Served) -> None:
    times: list[float] = []
    prompt = served.policy.template.first_prompt([{"role": "user", "content": [{"text": QUESTION}]}], None, None).ids
    request = TokenRequest(prompt, SamplingParams(max_new_tokens=200, ignore_eos=True), "streamed-first")
    started = time.monotonic()
    shown: list[int] = []

    def watch(chunk: Any) -> None:
        times.append(time.monotonic() - started)
        shown.extend(chunk.output_ids.tolist())

    response = await generate(served.policy.backend, request, watch)
    assert shown == response.output_ids.tolist()
    assert len(times) > 50
    assert times[0] < 0.3 * times[-1]


async def test_an_abort_during_a_stream_keeps_the_shown_text(served: Served) -> None:
    prompt = served.policy.template.first_prompt([{"role": "user", "content": [{"text": QUESTION}]}], None, None).ids
    request = TokenRequest(prompt, SamplingParams(max_new_tokens=1500, ignore_eos=True), "streamed-aborted")
    shown: list[int] = []
    task = asyncio.create_task(
        generate(served.policy.backend, request, lambda chunk: shown.extend(chunk.output_ids.tolist()))
    )
    while len(shown) < 5:
        await asyncio.sleep(0.01)
    await served.policy.backend.abort("streamed-aborted")
    response = await task
    assert response.finish == Finish.ABORT
    assert shown == response.output_ids.tolist()
    assert response.versions[-1].stop == len(shown)
