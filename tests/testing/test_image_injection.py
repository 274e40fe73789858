"""No text becomes an image: attacks on the scripted servers of both wires, which decode text as the real ones do."""

from __future__ import annotations

import asyncio
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.picture_attacks import attacked
from support.scripted import tokenizer
from support.seeing import NAME, PAD, seeing
from tito_conformance.testing import HashPolicy, ScriptedEngine
from tito_core import Policy
from tito_core.ledger import Provenance

ATTACKS = 4
"""Attacks of each example: 300 in `make test`, and above 10,000 in `make prove`."""


@cache
def served(kind: str) -> tuple[ScriptedEngine, Policy]:
    """Return an engine that encodes text again where the real one does, and a policy on it."""
    qwen = tokenizer(NAME)
    policy = HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id])
    return seeing(kind, policy)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@settings(max_examples=75)
@given(seed=st.integers(0, 2**32), images=st.integers(0, 3))
def test_no_text_becomes_an_image(kind: str, seed: int, images: int) -> None:
    engine, policy = served(kind)
    blocks = attacked(Random(seed), ATTACKS, images)
    model = policy.model(sampling={"max_new_tokens": 1})

    async def play() -> None:
        async for _ in model.stream([{"role": "user", "content": blocks}]):
            pass

    asyncio.run(play())
    request = engine.requests[-1]
    assert len(request.images) == images
    pads = [at for at, token in enumerate(request.prompt_ids) if token == PAD]
    assert pads == [at for image in request.images for at in range(image.offset, image.offset + image.length)]
    [turn] = model.ledger
    assert turn.draft.prompt_ids.tolist() == list(request.prompt_ids)
    assert [(span.offset, span.length) for span in turn.draft.media] == [
        (image.offset, image.length) for image in request.images
    ]
    inside = turn.draft.prompt_ids == PAD
    assert (turn.draft.prompt_provenance[inside] == Provenance.PROMPT).all()
    engine.requests.clear()
    engine.exchanges.clear()
