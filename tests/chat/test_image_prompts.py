"""Random histories with images: first prompts and deltas of a real vision template hold one placeholder an image."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import zoo
from tito_conformance.testing import strategies
from tito_core.chat.images import count_images
from tito_core.chat.messages import image_blocks
from tito_core.chat.referee import Referee

SPELLED = ["<|image_pad|>", "<|vision_start|>", "<|im_end|>", "<|vision_start|><|image_pad|><|vision_end|>"]
LOOK: Any = {"name": "look", "description": "Look.", "inputSchema": {"json": {"type": "object", "properties": {}}}}
PLAIN = st.sampled_from(["Why?", "Open.", "a b", "x"])


@settings(max_examples=20)
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_nothink"])
@given(data=st.data())
def test_one_placeholder_for_each_image(name: str, data: st.DataObject) -> None:
    """Whatever the texts spell, in first prompts and in the delta after each answer."""
    texts = strategies.texts(SPELLED)
    tools: Any = data.draw(strategies.tool_specs())
    messages = data.draw(strategies.histories(tools, texts, images=st.binary(max_size=3)))
    template = zoo.template(name)
    pad = template.placeholder_id
    first = template.first_prompt(messages, None, tools)
    assert first.ids.tolist().count(pad) == count_images(messages) == len(image_blocks(messages))
    at = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if at >= 0:
        end = template.closer_id
        delta = template.delta(messages[at], messages[at + 1 :], end, tool_specs=tools, history=messages[:at])
        assert delta.ids.tolist().count(pad) == count_images(messages[at + 1 :])
        assert len(image_blocks(messages, at + 1)) == count_images(messages[at + 1 :])


@settings(max_examples=20)
@given(data=st.data())
def test_without_markup_it_is_the_plain_rendering(data: st.DataObject) -> None:
    template, tokenizer = zoo.template("qwen3_vl"), zoo.tokenizer("qwen3_vl")
    messages = data.draw(strategies.histories([LOOK], PLAIN, images=st.binary(max_size=3)))
    tools = [LOOK]
    referee = Referee(tokenizer.chat_template, template.arguments)
    plain = referee.render(messages, None, tools)
    expected = tokenizer.backend_tokenizer.encode(plain, add_special_tokens=False).ids
    assert template.first_prompt(messages, None, tools).ids.tolist() == expected


def test_images_are_in_the_order_of_their_placeholders() -> None:
    """Results come in the order of their calls, before the images of the same message."""

    def image(number: int) -> Any:
        return {"image": {"format": "png", "source": {"bytes": bytes([number])}}}

    def result(number: int) -> Any:
        shown = [image(number), {"text": "x"}, image(number + 10)]
        return {"toolResult": {"toolUseId": f"call_{number}", "status": "success", "content": shown}}

    uses: list[Any] = [{"toolUse": {"toolUseId": f"call_{i}", "name": "look", "input": {}}} for i in (1, 2)]
    content: list[Any] = [image(5), result(2), {"text": "y"}, result(1), image(6)]
    messages: list[Any] = [{"role": "assistant", "content": uses}, {"role": "user", "content": content}]
    found = [each["source"]["bytes"][0] for each in image_blocks(messages, 1)]
    assert found == [1, 11, 2, 12, 5, 6]
