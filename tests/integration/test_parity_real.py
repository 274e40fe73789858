"""Both real servers side by side with the same weights: the same agent, the same tokens."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from strands.types.exceptions import MaxTokensReachedException

from calculator import QUESTIONS, make_agent
from support.keeping import Keeper
from support.real import Served
from tito_core.ledger import Ledger

pytestmark = pytest.mark.engine
UUID = "00000000-0000-4000-8000-000000000000"


async def greedy(served: Served, question: str) -> Ledger:
    model = served.policy.model(sampling={"temperature": 0.0, "max_new_tokens": 96}, ledger=Ledger(UUID))
    with contextlib.suppress(MaxTokensReachedException):
        await make_agent(model).invoke_async(question, limits={"turns": 4})
    return model.ledger


async def test_the_demo_agent_samples_the_same_tokens_on_both_servers(keeper: Keeper) -> None:
    vllm, sglang = keeper.served("vllm"), keeper.served("sglang")
    for question in QUESTIONS[:6]:
        ours, theirs = await asyncio.gather(greedy(vllm, question), greedy(sglang, question))
        assert len(ours) == len(theirs) >= 1
        for left, right in zip(ours, theirs, strict=True):
            assert left.draft.prompt_ids.tolist() == right.draft.prompt_ids.tolist()
            assert left.draft.output_ids.tolist() == right.draft.output_ids.tolist()
            assert left.draft.fingerprint == right.draft.fingerprint
            assert np.abs(left.draft.logprobs - right.draft.logprobs).max() <= 1e-4
