"""Which templates are certified for images, and why the others are not."""

from __future__ import annotations

import re

import pytest

from support import zoo
from support.byte_level import SPECIAL, byte_level
from support.vision import TEMPLATE, VISION, tokenizer
from tito_core.chat.certify import Certificate
from tito_core.chat.template import ChatTemplate

BOTH, USER = ("user messages", "tool results"), ("user messages",)
FAMILIES = [
    ("qwen2_5_vl", "<|image_pad|>", USER, ""),
    ("qwen3_vl", "<|image_pad|>", BOTH, ""),
    ("qwen3_5_think", "<|image_pad|>", BOTH, ""),
    ("llava_next", "<image>", USER, ""),
    # Their servers add other tokens: each turn would be sampled, and then refused for its echo.
    ("gemma4", None, (), "<|image>"),
    ("idefics3", None, (), "<fake_token_around_image>"),
    ("qwen3", None, (), ""),
]


def certified(template: str) -> Certificate:
    return ChatTemplate.of(tokenizer(template)).certificate


@pytest.mark.parametrize(("name", "placeholder", "places", "added"), FAMILIES)
def test_families(name: str, placeholder: str | None, places: tuple[str, ...], added: str) -> None:
    template = zoo.template(name)
    certificate = template.certificate
    assert (certificate.placeholder, certificate.images) == (placeholder, places)
    assert {place for place, _ in certificate.images_refused} == set(BOTH) - set(places)
    assert (template.placeholder_id is None) == (placeholder is None)
    assert Certificate.from_json(certificate.to_json()) == certificate
    assert certificate.passed
    words = f"such as {added}, around and between an image's placeholders"
    assert not added or words in certificate.images_refused[0][1]


def test_tokens_that_the_template_itself_writes_around_an_image_are_no_hindrance() -> None:
    """As GLM-4V's."""
    tokens = ("<|image_start|>", "<|image|>", "<|image_end|>", "<|video|>")
    template = TEMPLATE.replace(TOKENS, "".join(tokens[:3]))
    made = byte_level(special=(*SPECIAL, *tokens), template=template)
    certificate = ChatTemplate.of(made).certificate
    assert (certificate.placeholder, certificate.images) == ("<|image|>", BOTH)
    assert certificate.media_ids == tuple(made.convert_tokens_to_ids(["<|image|>", "<|video|>"]))


@pytest.mark.parametrize("text", ["<|video|>", "<image>"])
def test_a_template_that_writes_a_placeholder_of_other_media_is_refused_for_images(text: str) -> None:
    """No media span would hold it, so the ledger could not be loaded."""
    made = byte_level(special=(*SPECIAL, *VISION, text), template=text + TEMPLATE)
    certificate = ChatTemplate.of(made).certificate
    assert (certificate.placeholder, certificate.images, certificate.media_ids) == (None, (), ())
    assert [text in reason for _, reason in certificate.images_refused] == [True, True]
    assert certificate.passed


def test_the_toy_template_is_certified() -> None:
    assert (certified(TEMPLATE).placeholder, certified(TEMPLATE).images) == (VISION[1], BOTH)


TOKENS, IS_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>", "part.type == 'image'"
NUMBERED = (
    TEMPLATE.replace("show(message.content)", "show(message.content, loop.index)")
    .replace("macro show(content)", "macro show(content, index)")
    .replace("{{- '<|vision_start|>", "{{- 'Picture ' ~ index ~ ': <|vision_start|>")
)
VARIANTS = {
    "numbered": (NUMBERED, "Picture"),
    "dropped": (TEMPLATE.replace(TOKENS, ""), "no control token"),
    "doubled": (TEMPLATE.replace(TOKENS, "<|image_pad|>" * 2), "no control token"),
    "first only": (TEMPLATE.replace(IS_IMAGE, f"{IS_IMAGE} and loop.first"), "control token"),
    "last only": (TEMPLATE.replace(IS_IMAGE, f"{IS_IMAGE} and loop.last"), "placeholder|control token"),
    "repr": (
        TEMPLATE.replace("in content -%}", "in [] -%}{%- endfor -%}{{- content -}}{%- for part in [] -%}"),
        "control",
    ),
    "spelled": (TEMPLATE.replace(TOKENS, "[picture]"), "no control token"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_template_that_numbers_or_drops_images_is_refused_for_them(name: str) -> None:
    """It is still certified for text."""
    template, words = VARIANTS[name]
    assert template != TEMPLATE
    certificate = certified(template)
    assert (certificate.images, certificate.placeholder) == ((), None)
    assert certificate.passed
    assert re.search(words, certificate.images_refused[0][1])


def test_an_unknown_placeholder_alone_is_found() -> None:
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|blob|>")
    made = byte_level(special=(*SPECIAL, "<|blob|>"), template=template)
    assert ChatTemplate.of(made).certificate.placeholder == "<|blob|>"
