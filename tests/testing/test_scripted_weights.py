"""A scripted engine has the weights of the folder that it loaded last, also within an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tito_conformance.testing import HashPolicy, InProcessTransport, ScriptedEngine, scripted_engine
from tito_core.backend import OptionalOutputs, SamplingParams, TokenRequest, create_backend
from tito_core.backend.generate import generate, score

pytestmark = pytest.mark.suite

PROMPT = np.arange(10, 74, dtype=np.int32)
TOKENS = 40


def made(kind: str) -> tuple[ScriptedEngine, Any]:
    policy = HashPolicy(500, eos_ids=[2])
    latency = lambda request: 0.6 if request.max_new_tokens == TOKENS else 0.0  # noqa: E731
    engine = scripted_engine(kind, policy, vocab_size=500, eos_ids=[2], latency=latency)
    return engine, create_backend(kind, "http://scripted", http_transport=lambda: InProcessTransport(engine))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_each_token_of_an_answer_has_the_logprob_of_its_own_weights(kind: str, streamed: bool) -> None:
    engine, backend = made(kind)
    await backend.load_weights("/a", "a")
    sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, stop_token_ids=())
    request = TokenRequest(PROMPT, sampling, "r")
    running = asyncio.create_task(generate(backend, request, (lambda chunk: None) if streamed else None))
    while not engine.running or not engine._active[0].emitted():
        await asyncio.sleep(0.01)
    await backend.load_weights("/b", "b")
    answer = await running
    assert [span.version for span in answer.versions] == ["a", "b"]
    cut = answer.versions[1].start
    assert 0 < cut < TOKENS
    ids = [*PROMPT.tolist(), *answer.output_ids.tolist()]
    by_b = (await score(backend, ids))[len(PROMPT) :]
    await backend.load_weights("/a", "a again")
    by_a = (await score(backend, ids))[len(PROMPT) :]
    assert np.array_equal(np.concatenate([by_a[:cut], by_b[cut:]]), answer.logprobs)
    assert np.max(np.abs(by_a - by_b)) > 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_first_folder_changes_nothing_and_another_one_does_until_the_first_is_loaded_again(kind: str) -> None:
    engine, backend = made(kind)
    ids = PROMPT.tolist()
    scores = [await score(backend, ids)]
    for version, folder in enumerate(("/a", "/b", "/b", "/a")):
        await backend.load_weights(folder, f"v{version}")
        scores.append(await score(backend, ids))
    start, a, b, b_again, a_again = (each[1:] for each in scores)
    assert np.array_equal(start, a)
    assert np.array_equal(a, a_again)
    assert np.array_equal(b, b_again)
    assert np.max(np.abs(a - b)) > 1
    assert engine.state.weights == 0


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_penalties_and_likely_tokens_name_plain_ids_by_any_weights(kind: str) -> None:
    _, backend = made(kind)
    for folder in ("/a", "/b"):
        await backend.load_weights(folder, folder)
    sampling = SamplingParams(max_new_tokens=20, presence_penalty=-2.0, stop_token_ids=())
    outputs = OptionalOutputs(top_logprobs=5)
    answer = await generate(backend, TokenRequest(PROMPT, sampling, "r", optional_outputs=outputs))
    assert int(answer.columns["top_ids"].values.max()) < 500
