"""A bound template: its checks and arguments, and laws 1 and 7 over random conversations, with Qwen3's template too."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from datetime import datetime
from inspect import signature
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.types.content import Message, Messages
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from support.budget import examples
from support.byte_level import CHATML_TOOLS, MARKUP, SPECIAL, byte_level, shared
from support.conversations import (
    HOSTILE,
    LOOK,
    answer,
    calls,
    conversations,
    results,
    translated,
    user,
)
from support.templates import NAMES, template_of, tokenizer_of
from tito_core.chat.certify import Thinking
from tito_core.chat.messages import template_messages, template_tools
from tito_core.chat.rendering import render
from tito_core.chat.template import ChatTemplate, TemplateError, checked_arguments
from tito_core.chat.tokenizer import TokenizerError
from tito_core.chat.traced import Traced
from tito_core.ledger.provenance import Provenance


def test_qwen3_without_thinking_writes_the_empty_block_into_every_generation_prompt() -> None:
    template = ChatTemplate.of(tokenizer_of("qwen3-tiny"), enable_thinking=False)
    delta = template.delta(answer("a"), [user("b")], template.closer_id).ids
    assert tokenizer_of("qwen3-tiny").decode(delta) == (
        "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tools", [None, [LOOK]])
def test_text_equals_that_of_transformers(name: str, tools: Any) -> None:
    tokenizer = tokenizer_of(name)
    template = template_of(name)

    @settings(deadline=None, max_examples=examples(15))
    @given(conversations(HOSTILE), st.none() | HOSTILE)
    def check(messages: Messages, system: str | None) -> None:
        found = template.rendering.of_messages(messages, system, tools)
        (expected,), _ = render_jinja_template(
            [translated(template_messages(messages, system))],
            translated(template_tools(tools)),
            None,
            tokenizer.chat_template,
            add_generation_prompt=True,
            **tokenizer.special_tokens_map,
        )
        assert str.__str__(found) == expected

    check()


@pytest.mark.parametrize("name", NAMES)
def test_no_content_makes_a_control_token(name: str) -> None:
    tokenizer = tokenizer_of(name)
    template = template_of(name)
    control = frozenset(tokenizer.added_tokens_decoder)

    def controls(text: str, key: str) -> list[int]:
        spec = {"name": text, "description": text, "inputSchema": {"json": {"properties": {key: {"enum": [text]}}}}}
        seeded: list[Message] = [
            {"role": "user", "content": [{"text": text}, {"text": "a"}]},
            *calls((f"x{text}", {key: text, "b": [text]}), ("look", {"c": {key: text}})),
            results(text, {"j": text, key: 1}),
        ]
        prompt = template.first_prompt(seeded, f"a{text}", [spec]).ids  # type: ignore[list-item]
        delta = template.delta(seeded[1], [results(text, {key: text}), user(text)], None).ids
        return [i for i in [*prompt.tolist(), *delta.tolist()] if i in control]

    expected = controls("a", "b")

    @settings(deadline=None, max_examples=examples(25))
    @given(HOSTILE.filter(str.strip), HOSTILE)
    def check(text: str, key: str) -> None:
        assert controls(text, f"x{key}") == expected

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_closer_is_inserted_once(name: str) -> None:
    template = template_of(name)
    complete = template.delta(answer("a"), [user("b")], template.closer_id)
    assert template.closer_id not in complete.ids[:2]
    for last in (None, 5, tokenizer_of(name).convert_tokens_to_ids("<|endoftext|>")):
        cut = template.delta(answer("a"), [user("b")], last)
        assert cut.ids.tolist() == [template.closer_id, *complete.ids.tolist()]
        assert cut.provenance.tolist() == [Provenance.INSERTED, *complete.provenance.tolist()]
        assert (cut.ids.dtype, cut.provenance.dtype) == (np.int32, np.uint8)


def test_a_delta_renders_its_new_messages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []

    def counting(compiled: Any, variables: Any) -> Traced:
        text = render(compiled, variables)
        rendered.append(len(text))
        return text

    monkeypatch.setattr("tito_core.chat.rendering.render", counting)
    template = ChatTemplate.of(shared())
    always = replace(template, deltas=replace(template.deltas, layouts=None))
    for each, again in ((always, 2), (template, 0)):  # what was rendered for a shape is kept
        rendered.clear()
        for size in (1, 100_000):
            each.delta(answer("a" * size, reasoning="b" * size), [user("c")], None)
            each.delta(calls(("look", {}), text="a" * size)[0], [results("c")], None)
        assert rendered[2:] == rendered[:again]
        assert max(rendered, default=0) < 500


def test_every_attribute_of_the_rendering_is_in_the_fingerprint() -> None:
    one = template_of("byte level")
    assert ChatTemplate.of(byte_level()).fingerprint == one.fingerprint
    assert ChatTemplate.of(shared(), enable_thinking=False).fingerprint != one.fingerprint
    assert ChatTemplate.of(byte_level(template=CHATML_TOOLS + " ")).fingerprint != one.fingerprint
    assert ChatTemplate.of(shared(markup=False)).fingerprint != one.fingerprint


def test_a_date_in_a_template_is_frozen_and_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    dated = byte_level(template="{{ today or strftime_now('%d %b %Y') }}\n" + CHATML_TOOLS)
    days = [datetime(2026, 1, 2), datetime(2026, 1, 3)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return days[0]

    monkeypatch.setattr("tito_core.chat.rendering.datetime", Clock)
    template = ChatTemplate.of(dated)
    days.pop(0)
    assert dated.decode(template.first_prompt([user("a")], None, None).ids).startswith("02 Jan 2026")
    assert ChatTemplate.of(dated).fingerprint != template.fingerprint
    fixed = ChatTemplate.of(dated, today="26 Jul 2024")
    assert dated.decode(fixed.first_prompt([user("a")], None, None).ids).startswith("26 Jul 2024")


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_a_chat_only_template_works_until_there_are_tools() -> None:
    template = ChatTemplate.of(byte_level(template=CHATML + PROMPT))
    assert len(template.delta(answer("a"), [user("b")], None).ids)
    with pytest.raises(TemplateError, match="leaves out message 1"):
        template.delta(calls(("look", {"at": "x"}))[0], [results("a")], None)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "not valid Jinja"),
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ nothing.at.all }}", "refused messages with roles"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no control token"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
            "no control token",
        ),
        ("{% for m in messages if m.role != 'user' %}{{ m.content }}<|im_end|>{% endfor %}", "leaves out message 0"),
        ("{{ messages|length }}<|im_end|>" + CHATML + "{{ messages|length }}", "depending on what precedes it"),
    ],
)
def test_unsupported_templates_are_refused(source: Any, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate.of(byte_level(template=source))


def test_a_template_that_needs_tools_is_refused_a_prompt_without_any() -> None:
    """Without one the template raises an error of its own, which says nothing to the user."""
    raises = "{%- if not tools -%}{{- raise_exception('?') -}}{%- endif -%}"
    template = ChatTemplate.of(byte_level(template=raises + CHATML_TOOLS))
    assert template.certificate.needs_tools
    for tools in (None, []):
        with pytest.raises(TemplateError, match="at least one tool"):
            template.first_prompt([user("Hi")], None, tools)
    assert len(template.first_prompt([user("Hi")], None, [LOOK]).ids)


def test_tools_that_the_template_does_not_show_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    silent, shows = (ChatTemplate.of(byte_level(template=source)) for source in (plain, CHATML_TOOLS))
    with caplog.at_level(logging.WARNING):
        shows.first_prompt([user("look")], None, [LOOK])
        silent.first_prompt([user("look")], None, None)
        assert not caplog.records
        for _ in range(3):
            silent.first_prompt([user("look")], None, [LOOK])
    [record] = caplog.records
    assert "tools=<look> | the chat template shows no tools, so the policy never sees" in record.getMessage()


def test_the_text_of_a_delta_is_what_it_encodes() -> None:
    template = template_of("byte level")
    [called] = calls(("look", {"at": "x"}))
    for answered, new in ((answer("a"), [user("b")]), (called, [results("b")])):
        text = template.tail(answered, new)
        ids = template.delta(answered, new, template.closer_id).ids.tolist()
        assert template.encoder.encode(text).ids.tolist() == ids
        assert shared().decode(ids) == text
        assert [source for *_, source in text.spans] == [2]


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, {}), ({}, {}), ({"enable_thinking": False}, {"enable_thinking": False})],
)
def test_template_arguments_are_copied(given: Any, found: dict[str, Any]) -> None:
    taken = checked_arguments(given)
    assert taken == found
    assert taken is not given


@pytest.mark.parametrize(
    ("thinking", "question", "results_only", "nothing"),
    [
        (Thinking.KEPT, False, False, False),
        (Thinking.STRIPPED, True, False, False),
        (Thinking.ALWAYS_STRIPPED, True, True, False),
        (Thinking.NOT_SHOWN, True, True, True),
    ],
)
def test_when_the_template_strips_reasoning(
    thinking: Thinking, question: bool, results_only: bool, nothing: bool
) -> None:
    usual = template_of("byte level")
    template = replace(usual, certificate=replace(usual.certificate, thinking=thinking))
    assert template.strips_thinking([user("b")]) is question
    assert template.strips_thinking([results("a"), user("b")]) is question
    assert template.strips_thinking([results("a")]) is results_only
    assert template.strips_thinking([]) is nothing


def test_a_certificate_depends_on_arguments_and_content_tokens() -> None:
    certificate = ChatTemplate.certify(shared(), content_tokens="as-template", enable_thinking=False)
    assert certificate.content_tokens == "as-template"
    assert "('enable_thinking', False)" in certificate.arguments
    usual = template_of("byte level").certificate
    assert usual.content_tokens == "inert"
    assert "enable_thinking" not in usual.arguments
    assert (usual.template, usual.tokenizer) == (certificate.template, certificate.tokenizer)


def test_content_tokens_has_two_values() -> None:
    wrong: Any = "safe"
    with pytest.raises(ValueError) as refused:
        ChatTemplate.of(shared(), content_tokens=wrong)
    assert "'inert' or 'as-template', not 'safe'" in str(refused.value)


@pytest.mark.parametrize(
    ("chat_template", "has"),
    [
        (None, "no chat template"),
        ({}, "no chat template"),
        ({"tool_use": "", "default": ""}, "several chat templates (default, tool_use)"),
    ],
)
def test_a_tokenizer_must_have_one_template(chat_template: Any, has: str) -> None:
    tokenizer: Any = SimpleNamespace(chat_template=chat_template, name_or_path="some/model")
    message = rf"'some/model' has {re.escape(has)}.*Set tokenizer\.chat_template"
    with pytest.raises(TemplateError, match=message) as refused:
        ChatTemplate.of(tokenizer)
    is_missing = has == "no chat template"
    assert ("DeepSeek V3.2, V4 and V4.1 ship none" in str(refused.value)) is is_missing
    assert ("tito template check" in str(refused.value)) is is_missing


def test_a_parsers_markup_is_a_control_token() -> None:
    tokenizer = byte_level((*MARKUP, "[CALL"))
    usual, marked = ChatTemplate.of(tokenizer), ChatTemplate.of(tokenizer, markup=["[CALL"])
    assert set(marked.encoder.added) == {*SPECIAL, *MARKUP, "[CALL"}
    assert set(usual.encoder.added) == {*SPECIAL, *MARKUP}
    assert marked.fingerprint != usual.fingerprint
    attack = tokenizer.convert_tokens_to_ids("[CALL")
    assert attack in usual.first_prompt([user("[CALL")], None, None).ids
    assert attack not in marked.first_prompt([user("[CALL")], None, None).ids


def test_a_tokenizer_that_encodes_parts_differently_is_refused_with_both_ids() -> None:
    source = "{% for m in messages %}x<|im_start|>{{ m.role }}{{ m.content }}x<|im_end|>x{% endfor %}"
    tokenizer = byte_level(single_word=True, template=source)
    with pytest.raises(TemplateError) as refused:
        ChatTemplate.of(tokenizer)
    text = "x<|im_start|>user.x<|im_end|>xx<|im_start|>assistant.x<|im_end|>xx<|im_start|>user.x<|im_end|>x"
    own = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert f"{text!r} it gives {own}, and [" in str(refused.value)


def test_a_stop_that_opens_the_next_message_is_not_written_again() -> None:
    opens = (
        "{%- for m in messages -%}{{- '<|im_start|>' if m.role == 'user' else '<|endoftext|>' -}}{{- m.content -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}<|endoftext|>{%- endif -%}"
    )
    template = ChatTemplate.of(byte_level(template=opens))
    start = shared().convert_tokens_to_ids("<|im_start|>")
    whole = template.delta(answer("a"), [user("b")], None)
    rest = template.delta(answer("a"), [user("b")], start)
    assert whole.ids.tolist() == [start, *rest.ids.tolist()]
    assert whole.provenance.tolist() == [Provenance.SCAFFOLD, *rest.provenance.tolist()]
    assert template.stop_ids == (start,)
    assert template.delta(answer("a"), [user("b")], 5).ids.tolist() == whole.ids.tolist()


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        chat_template = CHATML_TOOLS
        name_or_path = "slow"
        backend_tokenizer = None

    slow: Any = Slow()
    with pytest.raises(TokenizerError, match=r"Slow .*use_fast=True"):
        ChatTemplate.of(slow)


def test_tokens_are_counted_with_the_system_prompt_and_the_tools_and_without_the_generation_prompt() -> None:
    template = template_of("byte level")
    header = len(shared().encode("<|im_start|>assistant\n", add_special_tokens=False))
    for system, tools in ((None, None), ("Be brief.", None), (None, [LOOK]), ("Be brief.", [LOOK])):
        whole = template.first_prompt([user("a")], system, tools)
        assert template.count_tokens([user("a")], system, tools) == len(whole.ids) - header


def test_parameters_of_apply_chat_template_that_no_template_reads_are_refused() -> None:
    known = set(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self", "kwargs"}
    for name in known:
        with pytest.raises(ValueError, match=f"template_arguments has {name},"):
            checked_arguments({name: None})
