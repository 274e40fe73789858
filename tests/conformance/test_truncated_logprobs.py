"""A sound server whose logprobs are normalised over the tokens that a truncation keeps."""

from __future__ import annotations

import asyncio

import pytest

from support.scripted import tokenizer
from tito_conformance.checks import Tally
from tito_conformance.fixed import check_fixed_prompts
from tito_conformance.target import Target, connect
from tito_conformance.testing import HashPolicy, InProcessTransport, scripted_engine


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_top_k_1_may_report_another_logprob_than_greedy_sampling(wire: str) -> None:
    vocabulary, end = len(tokenizer()), int(tokenizer().eos_token_id)
    policy = HashPolicy(vocabulary, eos_ids=[end])
    engine = scripted_engine(
        wire,
        policy,
        vocab_size=vocabulary,
        eos_ids=[end],
        decode=lambda ids: str(tokenizer().decode(list(ids))),
        raw_logprobs=False,
        truncated_logprobs=True,
    )
    target = Target(wire, "http://scripted", tokenizer(), transport=lambda: InProcessTransport(engine))

    async def play() -> Tally:
        server, tally = await connect(target), Tally()
        assert server.policy.info.truncated_logprobs
        await check_fixed_prompts(server, tally, 2)
        return tally

    assert asyncio.run(play()).passed["obeyed"] > 8
