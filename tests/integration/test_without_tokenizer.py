"""An SGLang server without a tokenizer (`--skip-tokenizer-init`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from strands_tito.inspect.verify import rescore
from support.calculating import QUESTION, make_agent
from support.real import Served, policy_at, serve
from tito_core.backend import BadRequestError
from tito_core.ledger import LawViolationError, VocabularyCheck, check_ledger

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.parametrize("bare", ["sglang"], indirect=True)]
NATS = 1e-3


@pytest.fixture(scope="module")
def bare(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve(request.param, "smollm2", server_args=["--skip-tokenizer-init"]) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_tools_runs(bare: Served, stream: bool) -> None:
    model = bare.policy.model(sampling={"max_new_tokens": 64, "temperature": 0.0}, stream=stream)
    agent = make_agent(model, None)
    await agent.invoke_async(QUESTION)
    await agent.invoke_async("What is 3 * 4?")
    ledger = model.ledger
    check_ledger(ledger)
    assert len(ledger) >= 2
    assert any(call.status == "ok" for turn in ledger for call in turn.draft.calls)
    assert [turn.draft.engine.versions[0].version for turn in ledger] == [bare.policy.info.weight_version] * len(ledger)
    found = await rescore(ledger, bare.policy.backend)
    assert len(found.differences) == sum(len(turn.draft.output_ids) for turn in ledger)
    assert np.max(found.differences) <= NATS


async def test_optional_outputs_are_returned(bare: Served) -> None:
    optional_outputs = {"top_logprobs": 3, "prompt_logprobs": True}
    model = bare.policy.model(sampling={"max_new_tokens": 8, "temperature": 1.0}, optional_outputs=optional_outputs)
    async for _ in model.stream([{"role": "user", "content": [{"text": "Say it."}]}]):
        pass
    check_ledger(model.ledger)
    t = model.trajectory
    assert t.column("top_ids", 0).shape == (len(t), 3)
    assert np.isfinite(t.column("prompt_logprobs", np.nan)[1 : model.ledger[0].draft.columns.prompt]).all()


async def test_a_stop_string_is_refused_and_the_server_keeps_running(bare: Served) -> None:
    question: Any = [{"role": "user", "content": [{"text": "Count."}]}]
    model = bare.policy.model(sampling={"max_new_tokens": 8, "stop": ("three",)})
    with pytest.raises(BadRequestError, match="skip_tokenizer_init") as refused:
        async for _ in model.stream(question):
            pass
    assert refused.value.status == 400
    assert len(model.ledger) == 0
    model = bare.policy.model(sampling={"max_new_tokens": 8})
    async for _ in model.stream(question, cancel_signal=threading.Event()):
        pass
    assert len(model.ledger) == 1


async def test_its_vocabulary_is_compared_by_size(bare: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tito_core"):
        policy = await policy_at(bare.kind, bare.url)
    assert policy.vocabulary is VocabularyCheck.VOCAB_SIZE
    assert policy.ledger().header.vocabulary is VocabularyCheck.VOCAB_SIZE
    assert any("does not encode text" in record.getMessage() for record in caplog.records)
    with pytest.raises(LawViolationError, match="rows") as raised:
        await policy_at(bare.kind, bare.url, "qwen3-tiny")
    assert raised.value.law == 15
