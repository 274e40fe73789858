"""Harnesses through the gateway, on both real servers."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import numpy as np
import pytest
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

from calculator import QUESTIONS, make_agent
from strands_tito.gateway import Gateway
from strands_tito.inspect.verify import rescore
from support.real import Served
from tito_core.ledger.laws import check_ledger

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0.0, "max_new_tokens": 96}


async def ask(model: object, question: str) -> None:
    with contextlib.suppress(MaxTokensReachedException):
        await make_agent(model).invoke_async(question, limits={"turns": 4})  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_through_the_gateway_has_the_ledger_of_one_on_the_model(served: Served, stream: bool) -> None:
    """Law 13: prompts and greedy answers are equal, token for token."""
    async with Gateway(served.policy, sampling=GREEDY) as gateway:
        for number, question in enumerate(QUESTIONS[:4]):
            direct = served.model(**GREEDY)
            await ask(direct, question)
            arguments = {"base_url": f"{gateway.url}/sessions/{number}/v1", "api_key": "EMPTY"}
            await ask(OpenAIModel(client_args=arguments, model_id="any", stream=stream), question)
            ledger = gateway.ledger(str(number))
            check_ledger(ledger)
            assert len(ledger) == len(direct.ledger) >= 1
            for ours, theirs in zip(ledger, direct.ledger, strict=True):
                assert ours.parent == theirs.parent
                assert ours.draft.prompt_ids.tolist() == theirs.draft.prompt_ids.tolist()
                assert ours.draft.output_ids.tolist() == theirs.draft.output_ids.tolist()
                assert np.abs(ours.draft.logprobs - theirs.draft.logprobs).max() <= 1e-4


async def chat(http: httpx.AsyncClient, said: list[Any]) -> list[Any]:
    answer = (await http.post("/v1/chat/completions", json={"model": "any", "messages": said})).json()
    return [answer["choices"][0]["message"]]


async def anthropic(http: httpx.AsyncClient, said: list[Any]) -> list[Any]:
    body = {"model": "any", "messages": said, "max_tokens": 48}
    counted = (await http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    answer = (await http.post("/v1/messages", json=body)).json()
    assert counted == answer["usage"]["input_tokens"] + answer["usage"].get("cache_read_input_tokens", 0)
    return [{"role": "assistant", "content": answer["content"]}]


async def responses(http: httpx.AsyncClient, said: list[Any]) -> list[Any]:
    return list((await http.post("/v1/responses", json={"model": "any", "input": said})).json()["output"])


@pytest.mark.parametrize("ask", [chat, anthropic, responses])
async def test_a_script_on_each_wire_is_one_path_that_the_engine_confirms(served: Served, ask: Any) -> None:
    async with (
        Gateway(served.policy, sampling={"max_new_tokens": 48}) as gateway,
        httpx.AsyncClient(base_url=f"{gateway.url}/sessions/script", timeout=300) as http,
    ):
        said: list[Any] = [{"role": "user", "content": "What time is it?"}]
        for _ in range(4):
            said += [*await ask(http, said), {"role": "user", "content": "Go on."}]
        ledger = gateway.ledger("script")
    check_ledger(ledger)
    assert [path.turns for path in ledger.trajectories] == [(0, 1, 2, 3)]
    differences = (await rescore(ledger, served.policy.backend)).differences
    assert len(differences) > 0
    assert differences.max() <= 1e-3
