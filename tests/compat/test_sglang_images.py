"""Pictures through `SGLangModel`, as users of strands-sglang write it, on a scripted server."""

from __future__ import annotations

import base64
from typing import Any

from strands import Agent

from support.names import client_of
from support.scripted import tokenizer
from support.seeing import NAME, PAD, shape
from support.vision import image
from tito_conformance.testing import HashPolicy, scripted_engine
from tito_conformance.testing.pictures import picture
from tito_sglang import SGLangModel


async def test_pictures_reach_the_server_and_the_rollout_has_the_ids_that_it_read() -> None:
    qwen = tokenizer(NAME)
    script = HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id], eos_weight=1e6)
    engine = scripted_engine("sglang", script, **shape())
    client = client_of(engine)
    assert await client.is_multimodal()
    model = SGLangModel(client=client, tokenizer=qwen, sampling_params={"max_new_tokens": 8})
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async([image(picture(1)), {"text": "What is this?"}])
    await agent.invoke_async([{"text": "And this?"}, image(picture(2, 96, 64))])
    urls = [f"data:image/png;base64,{base64.b64encode(picture(*each)).decode()}" for each in ((1,), (2, 96, 64))]
    assert engine.requests[-1].body["image_data"] == urls
    history: Any = agent.messages
    assert SGLangModel.collect_image_data(history, is_multimodal=True) == urls
    assert [each.data for each in model.trajectory.images] == [picture(1), picture(2, 96, 64)]
    rollout = model.rollout
    assert rollout.image_data == urls
    assert rollout.token_ids.count(PAD) == 4 + 6
    assert rollout.token_ids == [*engine.requests[-1].prompt_ids, *model.ledger[-1].draft.output_ids.tolist()]
    assert len(rollout.logprobs) == len(rollout.loss_mask) == len(rollout.token_ids)
    for token, logprob, mask in zip(rollout.token_ids, rollout.logprobs, rollout.loss_mask, strict=True):
        assert not mask or logprob is not None
        assert token != PAD or (logprob is None and not mask), "inside an image there is no logprob"
    model.reset()
    assert model.rollout.image_data == []
