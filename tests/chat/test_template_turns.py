"""A bound template: its checks, its arguments, and its deltas."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from support.byte_level import CHATML_TOOLS, MARKUP, SPECIAL, byte_level, shared
from support.conversations import LOOK, answer, calls, results, user
from support.templates import template_of
from tito_core.chat.certify import Thinking
from tito_core.chat.template import ChatTemplate, TemplateError, checked_arguments
from tito_core.chat.tokenizer import TokenizerError
from tito_core.ledger.provenance import Provenance


def own_tools() -> ChatTemplate:
    """Return a template that renders the tools after the messages."""
    return ChatTemplate.of(byte_level(template=CHATML_TOOLS.replace("{%- if add", "{{- tools|tojson -}}{%- if add")))


def test_the_text_of_a_delta_is_what_it_encodes() -> None:
    template = template_of("byte level")
    [called] = calls(("look", {"at": "x"}))
    for answered, new in ((answer("a"), [user("b")]), (called, [results("b")])):
        text = template.tail(answered, new)
        ids = template.delta(answered, new, template.closer_id).ids.tolist()
        assert template.encoder.encode(text).ids.tolist() == ids
        assert shared().decode(ids) == text
        assert [source for *_, source in text.spans] == [2]


def test_the_text_of_a_delta_needs_what_the_delta_needs() -> None:
    template = own_tools()
    assert template.certificate.candidate == "after a question, with the rollout's tools"
    with pytest.raises(TemplateError, match="pass tool_specs="):
        template.tail(answer("a"), [user("b")])
    text = template.tail(answer("a"), [user("b")], tool_specs=[LOOK])
    assert text.startswith("\n<|im_start|>user\nb<|im_end|>\n[{")
    assert '"look"' in text
    marked = replace(template, deltas=replace(template.deltas, candidate=template_candidate()))
    with pytest.raises(TemplateError, match="pass history="):
        marked.tail(answer("a"), [user("b")], tool_specs=[LOOK])
    assert marked.tail(answer("a"), [user("b")], tool_specs=[LOOK], history=[user("a")])


def template_candidate() -> Any:
    from tito_core.chat.delta import Candidate

    return Candidate("where there was one", before_after_results=[user("l")])


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, {}), ({}, {}), ({"enable_thinking": False}, {"enable_thinking": False})],
)
def test_template_arguments_are_copied(given: Any, found: dict[str, Any]) -> None:
    taken = checked_arguments(given)
    assert taken == found
    assert taken is not given


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"content_tokens": "inert"}, "content_tokens"),
        ({"certificates": None, "x": 1, "markup": ()}, "certificates, markup"),
        ({"certificates": None}, "certificates"),
    ],
)
def test_our_own_parameters_are_refused_as_template_arguments(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"template_arguments has {named}, .*content_tokens="):
        checked_arguments(given)


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


def test_a_template_from_a_cached_certificate_is_equal(tmp_path: Path) -> None:
    made, again = (ChatTemplate.of(shared(), certificates=tmp_path) for _ in range(2))
    assert len(list(tmp_path.iterdir())) == 1
    for name in ("certificate", "fingerprint", "closer_id", "stop_ids", "arguments"):
        assert getattr(made, name) == getattr(again, name)
    assert made.arguments == shared().special_tokens_map
    assert (made.closer_id, made.stop_ids) == (2, (2,))
    found, kept = (each.delta(answer("a"), [user("b")], None) for each in (made, again))
    assert found.ids.tolist() == kept.ids.tolist()


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
