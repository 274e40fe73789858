"""Which templates are certified for images, and why the others are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import zoo
from support.byte_level import SPECIAL, byte_level
from support.vision import TEMPLATE, VISION, tokenizer
from tito_core.chat.certify import Certificate
from tito_core.chat.template import ChatTemplate

BOTH, USER = ("user messages", "tool results"), ("user messages",)
FAMILIES = [
    ("qwen2_5_vl", "<|image_pad|>", USER),
    ("qwen3_vl", "<|image_pad|>", BOTH),
    ("qwen3_5_think", "<|image_pad|>", BOTH),
    ("llava_next", "<image>", USER),
    ("gemma4_v5", None, ()),
    ("gemma4", None, ()),
    ("idefics3", None, ()),
    ("smolvlm", None, ()),
    ("muse_glimmer", None, ()),
    ("gemma3", None, ()),
    ("qwen3", None, ()),
    ("llama3", None, ()),
]


def certified(template: str, tmp_path: Path) -> Certificate:
    return ChatTemplate.of(tokenizer(template), certificates=tmp_path).certificate


@pytest.mark.parametrize(("name", "placeholder", "places"), FAMILIES)
def test_families(name: str, placeholder: str | None, places: tuple[str, ...], tmp_path: Path) -> None:
    template = ChatTemplate.of(zoo.tokenizer(name), certificates=tmp_path)
    certificate = template.certificate
    assert (certificate.placeholder, certificate.images) == (placeholder, places)
    assert {place for place, _ in certificate.images_refused} == set(BOTH) - set(places)
    assert (template.placeholder_id is None) == (placeholder is None)
    assert Certificate.from_json(certificate.to_json()) == certificate


@pytest.mark.parametrize(
    ("name", "token"),
    [("gemma4_v5", "<|image>"), ("gemma4", "<|image>"), ("idefics3", "<fake_token_around_image>"),
     ("muse_glimmer", "<|image_start|>"), ("gemma3", "<start_of_image>")],
)  # fmt: skip
def test_a_family_whose_servers_add_other_tokens_is_refused_with_one_of_them(
    name: str, token: str, tmp_path: Path
) -> None:
    """Each turn would be sampled, and then refused for its echo."""
    certificate = ChatTemplate.of(zoo.tokenizer(name), certificates=tmp_path).certificate
    assert f"such as {token}, around and between an image's placeholders" in certificate.images_refused[0][1]
    assert certificate.passed


def test_tokens_that_the_template_itself_writes_around_an_image_are_no_hindrance(tmp_path: Path) -> None:
    """As GLM-4V's."""
    tokens = ("<|image_start|>", "<|image|>", "<|image_end|>", "<|video|>")
    template = TEMPLATE.replace(TOKENS, "".join(tokens[:3]))
    made = byte_level(special=(*SPECIAL, *tokens), template=template)
    certificate = ChatTemplate.of(made, certificates=tmp_path).certificate
    assert (certificate.placeholder, certificate.images) == ("<|image|>", BOTH)
    assert certificate.media_ids == tuple(made.convert_tokens_to_ids(["<|image|>", "<|video|>"]))


@pytest.mark.parametrize("text", ["<|video|>", "<image>"])
def test_a_template_that_writes_a_placeholder_of_other_media_is_refused_for_images(text: str, tmp_path: Path) -> None:
    """No media span would hold it, so the ledger could not be loaded."""
    made = byte_level(special=(*SPECIAL, *VISION, text), template=text + TEMPLATE)
    certificate = ChatTemplate.of(made, certificates=tmp_path).certificate
    assert (certificate.placeholder, certificate.images, certificate.media_ids) == (None, (), ())
    assert [text in reason for _, reason in certificate.images_refused] == [True, True]
    assert certificate.passed


def test_the_toy_template_is_certified(tmp_path: Path) -> None:
    assert (certified(TEMPLATE, tmp_path).placeholder, certified(TEMPLATE, tmp_path).images) == (VISION[1], BOTH)


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
def test_a_template_that_numbers_or_drops_images_is_refused_for_them(name: str, tmp_path: Path) -> None:
    """It is still certified for text."""
    template, words = VARIANTS[name]
    assert template != TEMPLATE
    certificate = certified(template, tmp_path)
    assert (certificate.images, certificate.placeholder) == ((), None)
    assert certificate.passed
    assert re.search(words, certificate.images_refused[0][1])


def test_an_unknown_placeholder_alone_is_found(tmp_path: Path) -> None:
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|blob|>")
    made = byte_level(special=(*SPECIAL, "<|blob|>"), template=template)
    assert ChatTemplate.of(made, certificates=tmp_path).certificate.placeholder == "<|blob|>"
